"""Generates memories straight into a database of hindsight-api, which made the banks and their indexes itself."""

import hashlib
import random
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psycopg

DIMENSION = 384
CLUSTERS = 40  # of each bank; the cosine of two memories of one is some 0.7, as of texts about one subject
SPREAD = 0.65
PER_DOCUMENT = 20
RECALLED = 10  # memories, of as many banks as can be, after a move
_INCOMING = (
    "CREATE TEMP TABLE incoming (id uuid, bank text, number int, kind text, document text, text text, "
    "embedding public.vector)"
)


def generate(connection: psycopg.Connection[Any], banks: list[str], words: list[str], first: int, last: int) -> None:
    """Generate the memories numbered from `first` up to and without `last` in each bank; the superuser is connected.

    Indexes other than those of constraints are made anew afterwards: row by row HNSW takes many times as long.
    """
    with connection.transaction():
        connection.execute("SET LOCAL session_replication_role = replica")
        connection.execute("SET LOCAL maintenance_work_mem = '1GB'")
        floor = _floor(connection, len(banks))
        connection.execute(_INCOMING)
        with connection.cursor().copy("COPY incoming FROM STDIN (FORMAT binary)") as copy:
            copy.write(b"PGCOPY\n\xff\r\n\0" + bytes(8))
            for bank in banks:
                for row in _rows(bank, words, range(first, last), floor):
                    copy.write(row)
            copy.write(b"\xff\xff")
        connection.execute("CREATE INDEX ON incoming (bank, number)")
        connection.execute("ANALYZE incoming")
        definitions = _take_indexes(connection)
        connection.execute(Path(__file__).with_name("generate.sql").read_bytes())
        for definition in definitions:
            connection.execute(definition)
        connection.execute("DROP TABLE incoming")
    connection.execute("VACUUM ANALYZE")


def _floor(connection: psycopg.Connection[Any], banks: int) -> str:
    """Return the hash above which ids have to be: after a move the memories of the least hashes are recalled by meaning.

    Those have to be the ones that hindsight-api stored: the vectors made here belong to no text.
    """
    found = connection.execute(
        "SELECT max(hash) FROM (SELECT md5(id::text) AS hash, row_number() OVER (PARTITION BY bank_id ORDER BY md5(id::text)) AS n "
        "FROM public.memory_units WHERE length(text) BETWEEN 20 AND 1000) AS memories WHERE n <= %s",
        (-(-RECALLED // banks),),
    ).fetchone()
    assert found is not None
    return str(found[0])


def _rows(bank: str, words: list[str], numbers: range, floor: str) -> Iterator[bytes]:
    seed = f"{bank} {numbers.start}"
    chance = random.Random(seed)
    clusters = _unit(np.random.default_rng(list(bank.encode())).standard_normal((CLUSTERS, DIMENSION)))
    noise = np.random.default_rng(list(seed.encode())).standard_normal((len(numbers), DIMENSION))
    picked = clusters[[number % CLUSTERS for number in numbers]]
    vectors = _unit(picked + SPREAD / DIMENSION**0.5 * noise).astype(">f4")
    for number, vector in zip(numbers, vectors, strict=True):
        kind = "observation" if number % 10 == 0 else "experience" if number % 10 <= 2 else "world"
        document = f"{bank}-{number // PER_DOCUMENT}"
        texts = [bank, number, kind, document, _text(chance, words, number)]
        yield _row([_identifier(chance, floor), *texts, struct.pack(">HH", DIMENSION, 0) + vector.tobytes()])


def _unit(vectors: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _identifier(chance: random.Random, floor: str) -> bytes:
    while True:
        identifier = uuid.UUID(int=chance.getrandbits(128), version=4)
        if hashlib.md5(str(identifier).encode(), usedforsecurity=False).hexdigest() > floor:
            return identifier.bytes


def _text(chance: random.Random, words: list[str], number: int) -> str:
    """Return a sentence of some hundred characters, which no other memory has."""
    picked = chance.choices(words, k=max(6, round(chance.gauss(17, 5))))
    return f"{' '.join(picked).capitalize()}, number {number}."


def _row(values: list[Any]) -> bytes:
    fields = [
        value if isinstance(value, bytes) else struct.pack(">i", value) if isinstance(value, int) else value.encode()
        for value in values
    ]
    return struct.pack(">h", len(fields)) + b"".join(struct.pack(">i", len(field)) + field for field in fields)


def _take_indexes(connection: psycopg.Connection[Any]) -> list[str]:
    """Drop the indexes of the large tables that no constraint needs, and return how to make them."""
    found = connection.execute(
        "SELECT x.indexrelid::regclass::text, pg_get_indexdef(x.indexrelid) FROM pg_index x "
        "WHERE x.indrelid IN ('public.memory_units'::regclass, 'public.memory_links'::regclass) "
        "AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = x.indexrelid)"
    ).fetchall()
    for name, _ in found:
        connection.execute(f"DROP INDEX {name}")
    return [str(definition) for _, definition in found]
