import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar import environment

OURS = ["HINDSIGHT_SIDECAR_LISTEN", "HINDSIGHT_SIDECAR_API_KEY", "HINDSIGHT_SIDECAR_RUN_DIR", "HINDSIGHT_SIDECAR_TOKEN"]
SECRETS = ["HINDSIGHT_SIDECAR_API_KEY", "HINDSIGHT_SIDECAR_TOKEN"]


def sort(**environ: str) -> environment.Sorted:
    return environment.sort(environ, OURS, SECRETS)


# As Kubernetes writes them for a Service of one named port: kubelet, pkg/kubelet/envvars.
LINKS = {
    "SERVICE_HOST": "10.0.0.7",
    "SERVICE_PORT": "8888",
    "SERVICE_PORT_HTTP": "8888",
    "SERVICE_PORT_MY_PORT2": "8890",
    "PORT": "tcp://10.0.0.7:8888",
    "PORT_8888_TCP": "tcp://10.0.0.7:8888",
    "PORT_8888_TCP_PROTO": "tcp",
    "PORT_8888_TCP_PORT": "8888",
    "PORT_8888_TCP_ADDR": "10.0.0.7",
    "PORT_53_UDP": "udp://10.0.0.7:53",
    "PORT_9_SCTP_ADDR": "10.0.0.7",
}


@pytest.mark.parametrize("prefix", ["HINDSIGHT_SIDECAR_", "HINDSIGHT_API_"])
@pytest.mark.parametrize("name", LINKS)
def test_service_links_are_dropped_under_both_prefixes(prefix: str, name: str) -> None:
    found = sort(**{prefix + name: LINKS[name], "PATH": "/bin"})
    assert found == environment.Sorted({"PATH": "/bin"}, [prefix + name], [])


def test_a_port_that_a_person_set_is_no_service_link() -> None:
    assert not environment.is_service_link("HINDSIGHT_API_PORT", "8887")
    assert sort(HINDSIGHT_API_PORT="8887").kept == {"HINDSIGHT_API_PORT": "8887"}


def test_links_of_other_services_are_not_ours_to_drop() -> None:
    assert sort(POSTGRES_SERVICE_HOST="10.0.0.8").kept == {"POSTGRES_SERVICE_HOST": "10.0.0.8"}


def test_no_setting_of_ours_can_be_taken_for_a_service_link() -> None:
    from sidecar.settings import setting_names  # noqa: PLC0415

    assert not [name for name in setting_names().values() if environment.is_service_link(name, "tcp://10.0.0.7:1")]


def test_an_unknown_name_is_a_fault_with_the_nearest_known_one() -> None:
    (fault,) = sort(HINDSIGHT_SIDECAR_LISTN="127.0.0.1:1").faults
    assert fault == "HINDSIGHT_SIDECAR_LISTN is not a setting of the sidecar; did you mean HINDSIGHT_SIDECAR_LISTEN?"


def test_a_secrets_file_is_suggested_too() -> None:
    (fault,) = sort(HINDSIGHT_SIDECAR_TOKN_FILE="/x").faults
    assert "did you mean HINDSIGHT_SIDECAR_TOKEN_FILE?" in fault


def test_an_unknown_name_like_none_points_to_the_table() -> None:
    (fault,) = sort(HINDSIGHT_SIDECAR_XYZZY_QQ="1").faults
    assert fault.endswith("docs/settings.md lists them")


def test_a_setting_that_is_no_secret_has_no_file() -> None:
    (fault,) = sort(HINDSIGHT_SIDECAR_LISTEN_FILE="/x").faults
    assert "HINDSIGHT_SIDECAR_LISTEN_FILE is not a setting" in fault


def test_a_secret_and_its_file_are_not_both_set() -> None:
    (fault,) = sort(HINDSIGHT_SIDECAR_TOKEN="a", HINDSIGHT_SIDECAR_TOKEN_FILE="/x").faults  # noqa: S106
    assert fault == "HINDSIGHT_SIDECAR_TOKEN and HINDSIGHT_SIDECAR_TOKEN_FILE are both set; set one of them"


@pytest.mark.parametrize("name", ["HINDSIGHT_DATABASE_URL", "HINDSIGHT_DB_URL", "HINDSIGHT_MEMORY_DATABASE_URL"])
def test_another_database_is_never_silently_ignored(name: str) -> None:
    (fault,) = sort(**{name: "postgresql://elsewhere/x"}).faults
    assert fault.startswith(f"{name} is set, and the sidecar brings its own database; unset it")
    assert "elsewhere" not in fault  # it may hold a password


def test_the_seeds_data_directory_is_renamed_by_the_operator_and_not_guessed() -> None:
    (fault,) = sort(HINDSIGHT_PGDATA="/opt/data/pg").faults
    assert "HINDSIGHT_PGDATA is set to /opt/data/pg, and the sidecar reads PGDATA" in fault
    assert sort(HINDSIGHT_PGDATA="/opt/data/pg", PGDATA="/opt/hindsight/pgdata").faults == []


def test_all_faults_come_at_once() -> None:
    found = sort(
        HINDSIGHT_SIDECAR_LISTN="x",
        HINDSIGHT_SIDECAR_API_KEY="k",
        HINDSIGHT_SIDECAR_API_KEY_FILE="/k",
        HINDSIGHT_DATABASE_URL="postgresql://x",
        HINDSIGHT_PGDATA="/x",
    )
    assert len(found.faults) == 4


def test_nearest_ignores_the_prefix_that_all_share() -> None:
    assert environment.nearest("HINDSIGHT_SIDECAR_ZZZZ", OURS) is None
    assert environment.nearest("HINDSIGHT_SIDECAR_RUNDIR", OURS) == "HINDSIGHT_SIDECAR_RUN_DIR"


@given(
    st.dictionaries(st.text(st.characters(codec="ascii", exclude_characters="=\0"), min_size=1), st.text(max_size=9))
)
def test_what_has_neither_prefix_is_kept_as_it_is(environ: dict[str, str]) -> None:
    environ = {name: value for name, value in environ.items() if not name.startswith("HINDSIGHT_")}
    assert environment.sort(environ, OURS, SECRETS) == environment.Sorted(environ, [], [])
