import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.errors import SettingsError
from sidecar.settings import SOCKET_PATH_MAX, Address, Settings, load, secret_names, setting_names

Environ = Callable[..., dict[str, str]]
P = "HINDSIGHT_SIDECAR_"


def read(environ: dict[str, str]) -> Settings:
    return load(environ)[0]


def faults(environ: dict[str, str]) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        load(environ)
    return list(caught.value.faults)


def test_nothing_set_means_the_image() -> None:
    settings = read({})
    assert settings.listen == Address("127.0.0.1", 8888)
    assert settings.control_listen == Address("127.0.0.1", 8890)
    assert settings.api_listen == Address("127.0.0.1", 8887)
    assert settings.metrics_listen is None
    assert settings.api_key is None
    assert settings.token is None
    assert settings.pgdata == Path("/opt/hindsight/pgdata")
    assert settings.volume == Path("/opt/hindsight")
    assert settings.control_socket == Path("/run/hindsight/control.sock")
    assert settings.stop_grace == 9.0
    assert settings.blocked_exit_after is None


def test_pgdata_and_every_kind_of_value_come_from_the_environment(environ: Environ) -> None:
    settings = read(
        environ(
            PGDATA="/data/memories/pg",
            HINDSIGHT_SIDECAR_LISTEN="[::1]:9000",
            HINDSIGHT_SIDECAR_METRICS_LISTEN="0.0.0.0:9100",
            HINDSIGHT_SIDECAR_ALLOWED_HOSTS="hermes, memory.local ,",
            HINDSIGHT_SIDECAR_EPHEMERAL="true",
            HINDSIGHT_SIDECAR_FLAVOR="torch",
            HINDSIGHT_SIDECAR_STOP_GRACE="55",
            HINDSIGHT_SIDECAR_BLOCKED_EXIT_AFTER="600",
            HINDSIGHT_SIDECAR_PG_BINDIR="/usr/lib/postgresql/18/bin",
        )
    )
    assert settings.volume == Path("/data/memories")
    assert settings.listen == Address("::1", 9000)
    assert str(settings.listen) == "[::1]:9000"
    assert settings.metrics_listen == Address("0.0.0.0", 9100)  # noqa: S104
    assert settings.allowed_hosts == ("hermes", "memory.local")
    assert settings.ephemeral
    assert settings.flavor == "torch"
    assert settings.stop_grace == 55.0
    assert settings.blocked_exit_after == 600.0
    assert settings.pg_bindir == Path("/usr/lib/postgresql/18/bin")


def test_an_empty_optional_setting_is_off(environ: Environ) -> None:
    settings = read(environ(**{P + name: "" for name in ("METRICS_LISTEN", "PG_BINDIR", "BLOCKED_EXIT_AFTER")}))
    assert (settings.metrics_listen, settings.pg_bindir, settings.blocked_exit_after) == (None, None, None)


@pytest.mark.parametrize(
    ("text", "loopback"),
    [("127.0.0.1:1", True), ("127.9.9.9:1", True), ("localhost:1", True), ("[::1]:1", True), ("0.0.0.0:1", False),
     ("[::]:1", False), ("10.0.0.7:65535", False)],
)  # fmt: skip
def test_addresses(text: str, loopback: bool, environ: Environ) -> None:  # noqa: FBT001
    settings = read(environ(HINDSIGHT_SIDECAR_LISTEN=text, HINDSIGHT_SIDECAR_API_KEY="k"))
    assert str(settings.listen) == text
    assert settings.listen.is_loopback is loopback


@pytest.mark.parametrize(
    "text", ["8888", "127.0.0.1", ":8888", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:-1", "h:1", "",
             "127.0.0.1:8x", "127.0.0.1:\u0661", "tcp://127.0.0.1:1"],
)  # fmt: skip
def test_what_is_no_address_names_the_setting(text: str, environ: Environ) -> None:
    (fault,) = faults(environ(HINDSIGHT_SIDECAR_LISTEN=text))
    assert fault.startswith("HINDSIGHT_SIDECAR_LISTEN: ")
    assert "expected" in fault


@given(st.ip_addresses(), st.integers(1, 65535))
def test_an_address_is_read_as_it_is_written(host: object, port: int) -> None:
    text = str(Address(str(host), port))
    assert str(Settings.model_validate({"listen": text, "api_key": "k"}).listen) == text


def test_the_gateway_beyond_loopback_needs_a_key(environ: Environ) -> None:
    (fault,) = faults(environ(HINDSIGHT_SIDECAR_LISTEN="0.0.0.0:8888"))
    assert "others than this pod can reach; set HINDSIGHT_SIDECAR_API_KEY as well" in fault


@pytest.mark.parametrize("name", ["CONTROL_LISTEN", "API_LISTEN"])
def test_control_and_hindsight_api_stay_on_loopback_even_with_a_key(name: str, environ: Environ) -> None:
    (fault,) = faults(environ(**{P + name: "0.0.0.0:1", P + "API_KEY": "k", P + "TOKEN": "t"}))
    assert fault.startswith(f"HINDSIGHT_SIDECAR_{name} is 0.0.0.0:1")


def test_the_longest_possible_run_directory_is_one_that_a_socket_fits_in(environ: Environ) -> None:
    fits = "/" + "r" * (SOCKET_PATH_MAX - len("//side/.s.PGSQL.5432"))
    assert read(environ(HINDSIGHT_SIDECAR_RUN_DIR=fits)).run_dir == Path(fits)
    (fault,) = faults(environ(HINDSIGHT_SIDECAR_RUN_DIR=fits + "r"))
    assert "a socket path of 108 bytes, and 107 are possible" in fault
    two_bytes = "/" + "\u00e9" * 60
    assert "bytes" in faults(environ(HINDSIGHT_SIDECAR_RUN_DIR=two_bytes))[0]


@pytest.mark.parametrize(
    "name", ["PGDATA", "RUN_DIR", "PG_BINDIR", "API_VENV", "MODEL_DIR", "RERANKER_DIR", "TOKENIZER_DIR"]
)
def test_a_relative_path_is_a_fault(name: str, environ: Environ) -> None:
    variable = name if name == "PGDATA" else P + name
    (fault,) = faults(environ(**{variable: "somewhere/else"}))
    assert fault == f"{variable}: 'somewhere/else' is a relative path; expected an absolute one"


@pytest.mark.parametrize(
    ("pgdata", "run_dir"), [("/", "/run/x"), ("/data/pg", "/data/pg"), ("/data/pg", "/data/pg/run")]
)
def test_pgdata_is_a_subdirectory_that_does_not_hold_the_run_directory(
    pgdata: str, run_dir: str, environ: Environ
) -> None:
    (fault,) = faults(environ(PGDATA=pgdata, HINDSIGHT_SIDECAR_RUN_DIR=run_dir))
    assert fault.startswith(f"PGDATA is {pgdata}")


@pytest.mark.parametrize(
    ("name", "value"),
    [("STOP_GRACE", "0.5"), ("STOP_GRACE", "601"), ("STOP_GRACE", "nine"), ("API_HUNG_AFTER", "4"), ("FLAVOR", "cuda"),
     ("GATEWAY_TIMEOUT", "0"), ("BLOCKED_EXIT_AFTER", "0"), ("LOG_FORMAT", "xml"), ("LOG_LEVEL", "loud"),
     ("CHILD_LOG_LEVEL", "DEBUG"), ("EPHEMERAL", "perhaps")],
)  # fmt: skip
def test_what_a_setting_cannot_be_names_the_setting(name: str, value: str, environ: Environ) -> None:
    (fault,) = faults(environ(**{P + name: value}))
    assert fault.startswith(f"{P}{name}: ")


# Secrets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["API_KEY", "TOKEN"])
@pytest.mark.parametrize(
    ("content", "secret"),
    [("s3cret", "s3cret"), ("s3cret\n", "s3cret"), ("s3cret\r\n", "s3cret")],
)
def test_a_secret_may_come_from_a_file(name: str, content: str, secret: str, environ: Environ, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content.encode())
    settings = read(environ(**{f"{P}{name}_FILE": str(path)}))
    value = getattr(settings, name.lower())
    assert value.get_secret_value() == secret
    assert "s3cret" not in repr(settings)


def test_a_secret_file_that_is_not_there_is_a_fault(environ: Environ, tmp_path: Path) -> None:
    (fault,) = faults(environ(HINDSIGHT_SIDECAR_TOKEN_FILE=str(tmp_path / "none")))
    assert fault.startswith("HINDSIGHT_SIDECAR_TOKEN")
    assert "cannot be read" in fault
    assert "mount the secret there" in fault


def test_a_secret_file_that_is_no_text_is_a_fault(environ: Environ, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\xff\xfe")
    assert "cannot be read" in faults(environ(HINDSIGHT_SIDECAR_TOKEN_FILE=str(tmp_path / "secret")))[0]


@pytest.mark.parametrize("content", ["", "\n", "  \n"])
def test_an_empty_secret_is_a_fault_and_no_open_door(content: str, environ: Environ, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(content)
    assert "the secret is empty" in faults(environ(HINDSIGHT_SIDECAR_API_KEY_FILE=str(tmp_path / "secret")))[0]
    assert "the secret is empty" in faults(environ(HINDSIGHT_SIDECAR_TOKEN=content))[0]


@pytest.mark.parametrize("secret", ["two\n\n", " s", "tab\tin it", "schl\u00fcssel", "a\nb"])
def test_a_secret_that_no_header_can_carry_is_refused(secret: str, environ: Environ, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(secret.encode())
    (fault,) = faults(environ(**{f"{P}API_KEY_FILE": str(path)}))
    assert "no HTTP header can carry" in fault


def test_one_address_is_not_given_twice(environ: Environ) -> None:
    (fault,) = faults(environ(HINDSIGHT_SIDECAR_CONTROL_LISTEN="127.0.0.1:8888"))
    assert "HINDSIGHT_SIDECAR_LISTEN and HINDSIGHT_SIDECAR_CONTROL_LISTEN are both 127.0.0.1:8888" in fault


@pytest.mark.parametrize("name", ["API_HUNG_AFTER", "GATEWAY_TIMEOUT", "BLOCKED_EXIT_AFTER", "STOP_GRACE"])
def test_a_time_has_an_end(name: str, environ: Environ) -> None:
    (fault,) = faults(environ(**{P + name: "inf"}))
    assert fault.startswith(P + name)


def test_a_secret_and_its_file_are_not_both_set(environ: Environ, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("b")
    (fault,) = faults(environ(HINDSIGHT_SIDECAR_TOKEN="a", HINDSIGHT_SIDECAR_TOKEN_FILE=str(tmp_path / "secret")))  # noqa: S106
    assert "are both set" in fault


def test_which_settings_are_secrets() -> None:
    named = ["API_KEY", "TOKEN", "SOURCE_TOKEN", "TENANT_KEY"]
    assert secret_names() == [f"HINDSIGHT_SIDECAR_{name}" for name in named]


# All at once ---------------------------------------------------------------------------------------------------


def test_every_kind_of_fault_is_told_at_once(environ: Environ, tmp_path: Path) -> None:
    told = faults(
        environ(
            HINDSIGHT_SIDECAR_LISTN="x",
            HINDSIGHT_DATABASE_URL="postgresql://x",
            HINDSIGHT_PGDATA="/x",
            HINDSIGHT_SIDECAR_FLAVOR="cuda",
            HINDSIGHT_SIDECAR_STOP_GRACE="0",
            HINDSIGHT_SIDECAR_CONTROL_LISTEN="0.0.0.0:1",
            HINDSIGHT_SIDECAR_TOKEN_FILE=str(tmp_path / "none"),
            HINDSIGHT_SIDECAR_API_KEY="",
        )
    )
    expected = (
        "LISTN",
        "DATABASE_URL",
        "HINDSIGHT_PGDATA",
        "FLAVOR",
        "STOP_GRACE",
        "CONTROL_LISTEN",
        "TOKEN",
        "API_KEY",
    )
    for name in expected:
        assert [name for fault in told if name in fault.split(" is ")[0].split(":")[0]], name
    assert len(told) == len(expected)


def test_a_faulty_secret_is_not_told_a_second_time_as_a_missing_one(environ: Environ, tmp_path: Path) -> None:
    told = faults(environ(HINDSIGHT_SIDECAR_LISTEN="0.0.0.0:1", HINDSIGHT_SIDECAR_API_KEY_FILE=str(tmp_path / "none")))
    assert len(told) == 1
    assert "cannot be read" in told[0]


def test_service_links_are_told_and_not_read(environ: Environ) -> None:
    settings, found = load(environ(HINDSIGHT_SIDECAR_PORT="tcp://10.0.0.7:8888", HINDSIGHT_API_SERVICE_HOST="10.0.0.7"))
    assert found.links == ["HINDSIGHT_API_SERVICE_HOST", "HINDSIGHT_SIDECAR_PORT"]
    assert settings == Settings()


def test_a_dotenv_file_that_lies_about_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("HINDSIGHT_SIDECAR_FLAVOR=torch\n")
    monkeypatch.chdir(tmp_path)
    assert Settings().flavor == "onnx"


def test_every_field_has_one_variable() -> None:
    names = setting_names()
    assert names["pgdata"] == "PGDATA"
    assert len(set(names.values())) == len(Settings.model_fields)
    assert all(name.startswith(P) for field, name in names.items() if field != "pgdata")
    assert not [name for name in os.environ if name.startswith(P)]  # tests/conftest.py removed ours


# Scheduled dumps -----------------------------------------------------------------------------------------------


def test_a_schedule_is_off_until_it_is_set(environ: Environ) -> None:
    settings = read(environ(HINDSIGHT_SIDECAR_DUMP_SCHEDULE="", HINDSIGHT_SIDECAR_DUMP_KEEP_DAYS=""))
    assert (settings.dump_schedule, settings.dump_keep, settings.dump_keep_days) == (None, 7, None)
    settings = read(
        environ(
            HINDSIGHT_SIDECAR_DUMP_SCHEDULE=" 17  3 * * mon-fri",
            HINDSIGHT_SIDECAR_DUMP_KEEP="1",
            HINDSIGHT_SIDECAR_DUMP_KEEP_DAYS="0.5",
        )
    )
    assert (settings.dump_schedule, settings.dump_keep, settings.dump_keep_days) == ("17 3 * * mon-fri", 1, 0.5)


def test_a_bad_schedule_is_one_fault_in_one_sentence(environ: Environ) -> None:
    (fault,) = faults(environ(HINDSIGHT_SIDECAR_DUMP_SCHEDULE="61 3 * * *"))
    assert fault == (
        "HINDSIGHT_SIDECAR_DUMP_SCHEDULE: '61 3 * * *' is no schedule (bad minute); expected five fields as cron has them, "
        "minute, hour, day of the month, month and day of the week, in UTC, such as '17 3 * * *'"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("KEEP", "0"), ("KEEP", "1.5"), ("KEEP_DAYS", "0"), ("KEEP_DAYS", "nan"), ("KEEP_DAYS", "1e9")]
)
def test_what_keeps_nothing_or_cannot_be_meant_is_a_fault(name: str, value: str, environ: Environ) -> None:
    (fault,) = faults(environ(**{f"{P}DUMP_{name}": value}))
    assert fault.startswith(f"{P}DUMP_{name}: ")
