"""Whether a database changed since a moment is told without reading its values, and what rows hold is told alike everywhere."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from postgres_server import Server, run, running_server

from sidecar import contents
from sidecar.contents import Contents, Moment, Table

TABLES = ("changing", "other")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_server() as server:
        yield server


@pytest.fixture
def database(server: Server) -> str:
    """Return a database with two tables of three rows each; one has a value beside its row."""
    name = server.make_database()
    for table in TABLES:
        server.execute(
            f"CREATE TABLE {table} (id int PRIMARY KEY, text text)",
            f"ALTER TABLE {table} ALTER text SET STORAGE external",
            f"INSERT INTO {table} SELECT n, repeat(n::text, 9000) FROM generate_series(1, 3) AS n",
            database=name,
            user="postgres",
        )
        server.execute(f"ALTER TABLE {table} OWNER TO hindsight", database=name)
    return name


def now(server: Server, database: str) -> Moment:
    async def work() -> Moment:
        async with await server.address(database).connect() as connection:
            return await contents.moment(connection)

    return run(work())


def read(server: Server, database: str, since: Moment | None = None) -> Contents:
    async def work() -> Contents:
        async with await server.address(database).connect() as connection, connection.transaction():
            return await contents.read(connection, since)

    return run(work())


def test_nothing_changed(server: Server, database: str) -> None:
    moment, before = now(server, database), read(server, database)
    assert read(server, database, moment) == before.unchanged()
    assert before.unchanged().tables == {f"public.{table}": Table(3, "") for table in TABLES}


@pytest.mark.parametrize(
    "statement",
    [
        "VACUUM (FULL, FREEZE)",
        "VACUUM (FREEZE, ANALYZE)",
        "CLUSTER changing USING changing_pkey",
        "BEGIN; SELECT FROM changing FOR UPDATE; COMMIT",
        "BEGIN; UPDATE changing SET text = ''; ROLLBACK",
        "BEGIN; INSERT INTO changing VALUES (4, ''); DELETE FROM changing WHERE id = 4; COMMIT",
    ],
)
def test_what_leaves_the_rows_as_they_are_is_no_change(statement: str, server: Server, database: str) -> None:
    moment, before = now(server, database), read(server, database)
    server.execute(*statement.split("; "), database=database)
    assert read(server, database, moment) == before.unchanged()
    assert read(server, database) == before


@pytest.mark.parametrize(
    "statement",
    [
        "INSERT INTO changing VALUES (4, '')",
        "DELETE FROM changing WHERE id = 2",
        "TRUNCATE changing",
        "UPDATE changing SET text = '' WHERE id = 2",
        "UPDATE changing SET id = id + 3",
        "BEGIN; DELETE FROM changing WHERE id = 2; INSERT INTO changing VALUES (4, ''); COMMIT",
        "BEGIN; CREATE TABLE kept AS TABLE changing; TRUNCATE changing; INSERT INTO changing SELECT id, '' FROM kept; DROP TABLE kept; COMMIT",
        "BEGIN; SAVEPOINT here; UPDATE changing SET text = '' WHERE id = 2; RELEASE here; COMMIT",
        "UPDATE changing SET text = '' WHERE id = 2; VACUUM FREEZE changing",
        "ALTER TABLE changing ALTER id TYPE bigint; ALTER TABLE changing ALTER id TYPE int",
    ],
)
def test_each_change_of_rows_is_told_of_its_table_alone(statement: str, server: Server, database: str) -> None:
    moment, before = now(server, database), read(server, database)
    server.execute(*statement.split("; "), database=database)
    after = read(server, database, moment)
    assert after.tables["public.changing"] != before.unchanged().tables["public.changing"]
    assert after.tables["public.other"] == before.unchanged().tables["public.other"]


@pytest.mark.parametrize("nested", ["", "SAVEPOINT here"])
def test_what_had_begun_and_was_not_committed_in_that_moment_is_told(
    nested: str, server: Server, database: str
) -> None:
    with server.connect(database) as writer, server.connect(database) as another:
        writer.execute("BEGIN")
        writer.execute("INSERT INTO other VALUES (4, '')")
        if nested:
            writer.execute(nested)
        writer.execute("UPDATE changing SET text = '' WHERE id = 2")
        # A later transaction that ends first: the writer's is then the oldest, and not the latest.
        another.execute("CREATE TABLE later (id int)")
        moment, before = now(server, database), read(server, database)
        writer.execute("COMMIT")
    after = read(server, database, moment)
    for table in TABLES:
        assert after.tables[f"public.{table}"] != before.unchanged().tables[f"public.{table}"]


def test_a_database_keeps_its_moment_with_another_name_and_another_one_of_its_name_does_not(
    server: Server, database: str
) -> None:
    moment, before = now(server, database), read(server, database)
    server.execute(f"ALTER DATABASE {database} RENAME TO renamed", database="postgres")
    assert read(server, "renamed", moment) == before.unchanged()
    server.execute(f"CREATE DATABASE {database} TEMPLATE renamed OWNER hindsight", database="postgres")
    copied = read(server, database)
    assert copied == before
    assert {table.content for table in read(server, database, moment).tables.values()} == {"of another database"}
    server.execute("DROP DATABASE renamed", database="postgres")


# What rows hold ------------------------------------------------------------------------------------------------


def content(server: Server, database: str, *statements: Any) -> Table:
    """Return what is told of table `t` after these statements."""
    server.execute("DROP TABLE IF EXISTS t", *statements, "ALTER TABLE t OWNER TO hindsight", database=database)
    return read(server, database).tables["public.t"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        # The array had a NULL once, and says so in its binary form.
        (
            "CREATE TABLE t AS SELECT ARRAY['a', NULL] AS a; UPDATE t SET a[2] = 'b'",
            "CREATE TABLE t AS SELECT ARRAY['a', 'b'] AS a",
        ),
        # There are two of them in a processor.
        (
            "CREATE TABLE t AS SELECT 'Infinity'::float8 - 'Infinity'::float8 AS a",
            "CREATE TABLE t AS SELECT 'NaN'::float8 AS a",
        ),
        # The type has another oid in each database.
        (
            "CREATE TYPE kind AS ENUM ('a', 'b'); CREATE TABLE t AS SELECT 'b'::kind AS a",
            "DROP TYPE kind; CREATE TYPE kind AS ENUM ('a', 'b'); CREATE TABLE t AS SELECT 'b'::kind AS a",
        ),
    ],
)
def test_values_that_are_told_alike_are_alike(one: str, other: str, server: Server, database: str) -> None:
    first, second = (content(server, database, *statements.split("; ")) for statements in (one, other))
    assert first == second


def test_it_is_the_same_with_several_workers(server: Server, database: str) -> None:
    made = (
        "CREATE TABLE t AS SELECT gen_random_uuid() AS id, 'grün ' || n AS text, now() + n * interval '1 s' AS at, "
        "ARRAY[n] AS a, random() AS f, jsonb_build_object('n', n) AS j FROM generate_series(1, 20000) AS n"
    )
    alone = content(server, database, made)
    server.execute(
        f"ALTER DATABASE {database} SET min_parallel_table_scan_size = 0",
        f"ALTER DATABASE {database} SET parallel_setup_cost = 0",
        f"ALTER DATABASE {database} SET debug_parallel_query = on",
        database=database,
    )
    assert read(server, database).tables["public.t"] == alone


def test_it_is_the_same_in_another_encoding(server: Server) -> None:
    found = []
    for encoding in ("UTF8", "LATIN1", "SQL_ASCII"):
        name = f"encoded_{encoding.lower()}"
        server.execute(
            f"CREATE DATABASE {name} OWNER hindsight TEMPLATE template0 ENCODING {encoding} LOCALE_PROVIDER libc LOCALE 'C'",
            database="postgres",
        )
        with psycopg.connect(
            host=str(server.directory), dbname=name, user="hindsight", autocommit=True, client_encoding="UTF8"
        ) as connection:
            connection.execute("CREATE TABLE t AS SELECT 'grün' AS text, '\"grün\"'::json AS j, 'grün'::tsvector AS v")
            connection.execute("ALTER DATABASE " + name + " SET debug_parallel_query = on")
        found.append(read(server, name).tables["public.t"])
    assert found[0] == found[1] == found[2]
