"""What PostgreSQL says itself, and what it has from a client."""

import pytest

from sidecar.postgres_log import no_space, said

AT = "2026-11-30 18:00:00.123 UTC [71] "
FULL = "No space left on device"
QUOTA = "Disk quota exceeded"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (f"{AT}LOG:  redo starts at 0/1000028", "LOG:  redo starts at 0/1000028"),
        ("LOG:  redo starts at 0/1000028", "LOG:  redo starts at 0/1000028"),
        (f"{AT}agent@hindsight ERROR:  53100: out", "ERROR:  out"),
        (f"{AT}STATEMENT:  SELECT 'LOG:  redo starts at 0/1'", "STATEMENT:  SELECT 'LOG:  redo starts at 0/1'"),
        (f'{AT}CONTEXT:  COPY notes, line 1: "ERROR:  x"', 'CONTEXT:  COPY notes, line 1: "ERROR:  x"'),
        ("\tLOG:  redo starts at 0/1000028", ""),
        (f"\tof a statement {AT}LOG:  redo starts at 0/1000028", ""),
        ("creating configuration files ... ok", ""),
        ("", ""),
    ],
)
def test_what_it_says_begins_with_its_first_keyword(line: str, what: str) -> None:
    assert said(line) == what


@pytest.mark.parametrize("want", [FULL, QUOTA])
@pytest.mark.parametrize(
    "line",
    [
        f'{AT}ERROR:  could not extend file "base/16385/17002": {{}}',
        f'{AT}ERROR:  53100: could not extend file "base/16385/17002" with FileFallocate(): {{}}',
        f'{AT}PANIC:  could not write to file "pg_wal/xlogtemp.71": {{}}',
        f'{AT}FATAL:  could not create lock file "postmaster.pid": {{}}',
        f'{AT}LOG:  could not write temporary statistics file "pg_stat/global.tmp": {{}}',
        f'{AT}ERROR:  cannot create temporary directory "base/pgsql_tmp": {{}}',
        # Of a transaction's status, which the ERROR before it does not explain.
        f'{AT}DETAIL:  Could not write to file "pg_xact/0001" at offset 8192: {{}}.',
        'initdb: error: could not create directory "/v/pgdata.making": {}',
        'creating subdirectories ... initdb: error: could not create directory "/v/pgdata.making/base": {}',
        f'running bootstrap script ... {AT}FATAL:  could not write to file "pg_wal/xlogtemp.71": {{}}',
        'pg_resetwal: error: could not write file "/v/pgdata.making/pg_wal/000000010000000000000001": {}',
        "mkdir: cannot create directory '/v/pgdata.making': {}",
        "/share/initscripts/10-initdb: 46: cannot create /v/pgdata.making/pg_hba.conf: {}",
    ],
)
def test_a_want_of_space_is_recognised_whoever_tells_it(line: str, want: str) -> None:
    assert no_space(line.format(want))


def test_a_short_write_is_one_too() -> None:
    assert no_space(f'{AT}ERROR:  could not extend file "base/5/1": wrote only 4096 of 8192 bytes at block 7')
    assert no_space(f'{AT}ERROR:  could not write file "base/5/1": wrote only 512 of 8192 bytes at offset 512')
    assert no_space(f'{AT}DETAIL:  Could not write to file "pg_xact/0001" at offset 8192: wrote too few bytes.')


@pytest.mark.parametrize("want", [FULL, QUOTA])
@pytest.mark.parametrize(
    "line",
    [
        f"{AT}STATEMENT:  INSERT INTO notes VALUES ('ERROR:  could not extend file: {{}}",
        f"{AT}LOG:  statement: SELECT 1 -- ERROR:  could not extend file: {{}}",
        f"{AT}DETAIL:  Key (text)=(could not extend file: {{}}",
        f"{AT}DETAIL:  Key (text)=(x: {{}}) already exists.",
        f'{AT}CONTEXT:  COPY notes, line 1, column text: "ERROR:  could not extend file: {{}}',
        f"{AT}QUERY:  ERROR:  could not extend file: {{}}",
        f'{AT}ERROR:  invalid input syntax for type uuid: "could not extend file: {{}}"',
        f"\t{AT}ERROR:  could not extend file: {{}}",
        "\tinitdb: error: could not create directory: {}",
        f"{AT}FATAL:  could not create shared memory segment: {{}}",
        f"{AT}HINT:  This error does *not* mean that you have run out of disk space: {{}}",
        "{}",
    ],
)
def test_a_clients_words_are_none(line: str, want: str) -> None:
    assert not no_space(line.format(want))


def test_the_hint_alone_is_none() -> None:
    """It comes with an error of the disk as well."""
    assert not no_space(f'{AT}ERROR:  could not extend file "base/5/1": Input/output error')
    assert not no_space(f"{AT}HINT:  Check free disk space.")
