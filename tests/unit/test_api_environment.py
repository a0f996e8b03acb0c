from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sidecar import api_environment, model
from sidecar.api_environment import (
    build,
    check,
    for_embedding,
    given,
    has_llm,
    make_directories,
    owned,
    tokenizer_table,
)
from sidecar.errors import BlockedError, Reason, SettingsError
from sidecar.settings import Address, Settings, secret_names
from sidecar.sizing import GIB, Machine
from sidecar.upstream import Upstream

A = "HINDSIGHT_API_"
NAMES = ("LLM_PROVIDER", "LLM_MODEL", "LLM_API_KEY", "LLM_TIMEOUT", "LLM_TRACE_ENABLED", "LOG_LEVEL", "RERANKER_PROVIDER",
         "CONSOLIDATION_LLM_MODEL", "EMBEDDINGS_ONNX_MODEL_ID", "MIGRATION_DATABASE_URL", "READ_DATABASE_URL")  # fmt: skip
Bake = Callable[..., Path]
Installed = Callable[..., Upstream]


@pytest.fixture
def made(bake: Bake) -> model.Model:
    return model.read(bake(), "onnx")


@pytest.fixture
def upstream(installed: Installed) -> Upstream:
    return installed(names=NAMES)


@pytest.fixture
def environment(made: model.Model, upstream: Upstream) -> Callable[..., dict[str, str]]:
    """Return a function that builds hindsight-api's environment from the sidecar's."""

    def make(environ: dict[str, str] | None = None, **settings: Any) -> dict[str, str]:
        return build(
            Settings(**settings),
            made,
            upstream,
            Machine(2 * GIB, 3),
            environ or {},
            {"HOME": "/run/hindsight/home", "USER": "u"},
        )

    return make


Environment = Callable[..., dict[str, str]]


def faults(environment: Environment, environ: dict[str, str], **settings: Any) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        environment(environ, **settings)
    return caught.value.faults


# What the sidecar decides --------------------------------------------------------------------------------------


def test_address_database_and_model_are_decided_here(environment: Environment, made: model.Model) -> None:
    env = environment(api_listen=Address("127.0.0.1", 9999), run_dir=Path("/run/hs"))
    assert env[f"{A}HOST"] == "127.0.0.1"
    assert env[f"{A}PORT"] == "9999"
    assert env[f"{A}DATABASE_URL"] == "postgresql://hindsight@/hindsight"
    assert env["PGHOST"] == "/run/hs"
    assert env[f"{A}WORKER_ID"] == "hindsight-sidecar"
    assert env[f"{A}EMBEDDINGS_PROVIDER"] == "onnx"
    assert env[f"{A}EMBEDDINGS_ONNX_MODEL_PATH"] == str(made.directory / "model.onnx")
    assert env[f"{A}EMBEDDINGS_ONNX_POOLING"] == "cls"
    assert env[f"{A}EMBEDDINGS_ONNX_NORMALIZE"] == "true"
    assert env[f"{A}EMBEDDINGS_ONNX_QUERY_PREFIX"] == ""
    assert env[f"{A}EMBEDDINGS_ONNX_PASSAGE_PREFIX"] == ""


def test_the_database_url_has_no_percent_sign_whatever_the_run_directory(environment: Environment) -> None:
    env = environment(run_dir=Path("/run/a%b c"))
    assert "%" not in env[f"{A}DATABASE_URL"]
    assert env["PGHOST"] == "/run/a%b c"


def test_torch_loads_the_directory(bake: Bake) -> None:
    found = owned(Settings(flavor="torch"), model.read(bake(), "torch"))
    assert found[f"{A}EMBEDDINGS_PROVIDER"] == "local"
    assert found[f"{A}EMBEDDINGS_LOCAL_MODEL"].endswith("/model")
    assert not [name for name in found if "ONNX" in name]


def test_an_equal_value_is_fine(environment: Environment, made: model.Model) -> None:
    env = environment(owned(Settings(), made))
    assert env[f"{A}PORT"] == "8887"


@pytest.mark.parametrize("url", ["postgresql://u:sesame@db/x", "postgresql://db/x?password=sesame", "PASSWORD=sesame"])
def test_the_password_of_a_database_that_is_refused_is_not_told(url: str, environment: Environment) -> None:
    for name in ("DATABASE_URL", "READ_DATABASE_URL"):
        [sentence] = faults(environment, {f"HINDSIGHT_API_{name}": url})
        assert sentence.startswith(f"HINDSIGHT_API_{name} is ")
        assert "sesame" not in sentence


def test_another_value_is_refused_by_name_and_all_at_once(environment: Environment, made: model.Model) -> None:
    decided = owned(Settings(), made)
    told = faults(environment, dict.fromkeys(decided, "other"))
    assert len(told) == len(decided)
    for name, value in decided.items():
        (sentence,) = [sentence for sentence in told if sentence.startswith(f"{name} is 'other'")]
        assert f"the sidecar decides it ({value!r}); unset it" in sentence


def test_a_baked_reranker_is_decided_too(environment: Environment, bake: Bake) -> None:
    directory = bake(kind="reranker")
    env = environment(reranker_dir=directory)
    assert env[f"{A}RERANKER_PROVIDER"] == "onnx"
    assert env[f"{A}RERANKER_ONNX_MODEL_PATH"] == str(directory / "model.onnx")
    assert env[f"{A}RERANKER_ONNX_TOKENIZER_NAME_OR_PATH"] == str(directory)
    (told,) = faults(environment, {f"{A}RERANKER_PROVIDER": "rrf"}, reranker_dir=directory)
    assert "the sidecar decides it" in told
    env = environment(reranker_dir=directory, flavor="torch")
    assert env[f"{A}RERANKER_PROVIDER"] == "local"
    assert env[f"{A}RERANKER_LOCAL_MODEL"] == str(directory)


def test_a_reranker_that_is_not_there_blocks(environment: Environment) -> None:
    with pytest.raises(BlockedError, match="HINDSIGHT_SIDECAR_RERANKER_DIR") as caught:
        environment(reranker_dir=Path("/nowhere"))
    assert caught.value.reason is Reason.MODEL_MISSING


def test_the_onnx_reranker_is_refused_where_hindsight_api_cannot_load_it(
    made: model.Model, installed: Installed, bake: Bake
) -> None:
    old = installed("0.8.4", names=NAMES)
    settings = Settings(reranker_dir=bake(kind="reranker"))
    (told,) = check({}, owned(settings, made), old)
    assert "0.8.4 loads a reranker with torch alone" in told


def test_a_local_reranker_needs_a_baked_one(environment: Environment) -> None:
    (told,) = faults(environment, {f"{A}RERANKER_PROVIDER": "local"})
    assert "HINDSIGHT_SIDECAR_RERANKER_DIR" in told


@pytest.mark.parametrize(
    "name", ["MIGRATION_DATABASE_URL", "READ_DATABASE_URL", "DB_URL", "MEMORY_DB_URL", "PG_DATABASE_URL"]
)
def test_another_database_is_refused_also_where_hindsight_does_not_read_the_name(
    name: str, environment: Environment
) -> None:
    (told,) = faults(environment, {A + name: "postgresql://u:geheim@h/d"})
    assert told == f"{A}{name} is set, and the sidecar brings its own database; unset it"


@pytest.mark.parametrize("name", ["DATABASE_URI", "DATABASE_ULR", "DATABSE_URL", "DATABASEURL"])
def test_a_mis_spelt_database_is_refused_with_the_name_that_was_meant(name: str, environment: Environment) -> None:
    (told,) = faults(environment, {A + name: "postgresql://elsewhere"})
    assert f"did you mean {A}DATABASE_URL?" in told


@pytest.mark.parametrize("name", [f"{A}LLM_PROVIDER", f"{A}RETAIN_LLM_PROVIDER"])
def test_a_provider_whose_program_is_not_here_is_refused(environment: Environment, name: str) -> None:
    (told,) = faults(environment, {name: "Claude-Code"})
    assert told.startswith(
        f"{name} is 'claude-code', and the program that it runs, claude, is not here; build the image"
    )
    assert "KEEP_CLAUDE_CLI=1" in told


def test_a_provider_whose_program_was_kept_or_brought_is_accepted(
    environment: Environment, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = upstream.package.parent / "claude_agent_sdk/_bundled/claude"
    bundled.parent.mkdir(parents=True)
    bundled.touch()
    assert environment({f"{A}LLM_PROVIDER": "claude-code"})[f"{A}LLM_PROVIDER"] == "claude-code"
    bundled.unlink()
    monkeypatch.setattr(api_environment.shutil, "which", lambda name, path: f"{path.split(':')[0]}/{name}")
    assert environment({f"{A}LLM_PROVIDER": "claude-code"})[f"{A}LLM_PROVIDER"] == "claude-code"


# What is passed ------------------------------------------------------------------------------------------------


def test_what_hindsight_reads_is_passed(environment: Environment) -> None:
    env = environment({f"{A}LOG_LEVEL": "debug", f"{A}RERANKER_PROVIDER": "cohere"})
    assert env[f"{A}LOG_LEVEL"] == "debug"
    assert env[f"{A}RERANKER_PROVIDER"] == "cohere"


def test_without_an_llm_there_is_none_and_with_one_hindsights_default_holds(environment: Environment) -> None:
    assert environment()[f"{A}LLM_PROVIDER"] == "none"
    assert environment({f"{A}LLM_TRACE_ENABLED": "false"})[f"{A}LLM_PROVIDER"] == "none"
    assert f"{A}LLM_PROVIDER" not in environment({f"{A}LLM_API_KEY": "sk", f"{A}LLM_MODEL": "m"})
    assert environment({f"{A}LLM_PROVIDER": "anthropic"})[f"{A}LLM_PROVIDER"] == "anthropic"
    assert environment({f"{A}LLM_PROVIDER": "none", f"{A}LLM_MODEL": "m"})[f"{A}LLM_PROVIDER"] == "none"


@pytest.mark.parametrize(
    ("environ", "has"),
    [({}, False), ({"LLM_PROVIDER": "none"}, False), ({"LLM_PROVIDER": "NONE", "LLM_MODEL": "m"}, False),
     ({"LLM_API_KEY": "k"}, True), ({"LLM_PROVIDER": "openai"}, True), ({"LLM_TRACE_ENABLED": "true"}, False)],
)  # fmt: skip
def test_has_llm(environ: dict[str, str], has: bool) -> None:  # noqa: FBT001
    assert has_llm({A + name: value for name, value in environ.items()}) is has


def test_nothing_of_the_sidecars_own_reaches_the_child(environment: Environment) -> None:
    environ = {
        "HINDSIGHT_SIDECAR_API_KEY": "geheim-1",
        "HINDSIGHT_SIDECAR_TOKEN": "geheim-2",
        "HINDSIGHT_SIDECAR_TOKEN_FILE": "/geheim-3",
        "PGDATA": "/geheim-4",
        "PGPASSWORD": "geheim-5",
        "DATABASE_URL": "geheim-6",
        "HOME": "/geheim-7",
        "PATH": "/geheim-8",
        "LD_PRELOAD": "geheim-9",
        "PYTHONPATH": "geheim-10",
        "KUBERNETES_SERVICE_HOST": "geheim-11",
    }
    env = environment(environ)
    assert not [name for name, value in env.items() if "geheim" in value or name.startswith("HINDSIGHT_SIDECAR_")]


def test_what_providers_and_networks_need_is_passed_and_what_the_operator_names(environment: Environment) -> None:
    wanted = {
        "OPENAI_API_KEY": "a",
        "AWS_REGION": "b",
        "HTTPS_PROXY": "c",
        "no_proxy": "d",
        "TZ": "Europe/Berlin",
        "MINE": "e",
    }
    env = environment({**wanted, "OTHER": "f"}, pass_env=("MINE",))
    assert {name: env.get(name) for name in wanted} == wanted
    assert "OTHER" not in env


def test_what_keeps_it_offline_cannot_be_overridden_from_outside(environment: Environment) -> None:
    env = environment(
        {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}, pass_env=("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    )
    assert (env["HF_HUB_OFFLINE"], env["TRANSFORMERS_OFFLINE"]) == ("1", "1")
    assert env["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"
    assert env["ORT_DISABLE_TELEMETRY"] == "1"


def test_everything_it_writes_goes_into_scratch_and_threads_follow_the_quota(environment: Environment) -> None:
    env = environment(run_dir=Path("/run/hs"))
    for name in ("TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert env[name].startswith("/run/hs/scratch")
    assert {env[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
    assert env["HOME"] == "/run/hindsight/home"
    assert env["PYTHONDONTWRITEBYTECODE"] == "1"


# What only embeds ----------------------------------------------------------------------------------------------

IDENTITY = {"HOME": "/run/hindsight/home", "USER": "u"}
NO_SECRETS = {
    f"{A}EMBEDDINGS_PROVIDER", f"{A}LLM_PROVIDER", f"{A}RERANKER_PROVIDER", f"{A}SKIP_LLM_VERIFICATION", "HF_HOME", "HF_HUB_DISABLE_TELEMETRY",
    "HF_HUB_OFFLINE", "HOME", "LITELLM_LOCAL_MODEL_COST_MAP", "MKL_NUM_THREADS", "MPLCONFIGDIR", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS",
    "ORT_DISABLE_TELEMETRY", "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "TMPDIR", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR",
    "TRANSFORMERS_OFFLINE", "USER", "XDG_CACHE_HOME",
}  # fmt: skip
ONNX = {
    f"{A}EMBEDDINGS_ONNX_{name}"
    for name in (
        "DIMENSIONS", "MAX_TOKENS", "MODEL_ID", "MODEL_PATH", "NORMALIZE", "PASSAGE_PREFIX", "POOLING", "QUERY_PREFIX", "TOKENIZER_NAME_OR_PATH"
    )
}  # fmt: skip
LOCAL = {f"{A}EMBEDDINGS_LOCAL_MODEL", f"{A}EMBEDDINGS_LOCAL_FORCE_CPU"}
TIKTOKEN = {"TIKTOKEN_CACHE_DIR", "CUSTOM_TIKTOKEN_CACHE_DIR"}
OF_EVERY_KIND = {
    **dict.fromkeys(secret_names(), "sesame"),
    **{
        name: f"sesame-{name}"
        for name in (
            f"{A}LLM_API_KEY", f"{A}RETAIN_LLM_API_KEY", f"{A}LLM_BASE_URL", f"{A}TENANT_API_KEY", f"{A}MCP_AUTH_TOKEN", f"{A}WEBHOOK_SECRET",
            f"{A}EMBEDDINGS_OPENAI_API_KEY", f"{A}EMBEDDINGS_ONNX_API_KEY", f"{A}RERANKER_COHERE_API_KEY", "ANTHROPIC_API_KEY",
            "AWS_SECRET_ACCESS_KEY", "AZURE_API_KEY", "CLAUDE_CODE_OAUTH_TOKEN", "GEMINI_API_KEY", "GOOGLE_API_KEY", "HTTPS_PROXY",
            "MINE", "OPENAI_API_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "PGPASSWORD", "VERTEXAI_KEY",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("version", "flavor", "names"),
    [("1.1.0", "onnx", ONNX), ("1.1.0", "torch", LOCAL), ("0.8.4", "onnx", ONNX | TIKTOKEN), ("0.8.4", "torch", LOCAL | TIKTOKEN)],
)  # fmt: skip
def test_what_only_embeds_has_nobodys_secret(
    version: str, flavor: Any, names: set[str], bake: Bake, installed: Installed
) -> None:
    baked, upstream = model.read(bake(), flavor), installed(version)
    settings = Settings(flavor=flavor, pass_env=("MINE",))
    given_to_both = (settings, baked, upstream, Machine(2 * GIB, 3), OF_EVERY_KIND, IDENTITY)
    env, of_the_server = for_embedding(*given_to_both), build(*given_to_both)
    assert set(env) == NO_SECRETS | names
    assert [name for name, value in env.items() if "sesame" in value] == []
    assert len([value for value in of_the_server.values() if "sesame" in value]) > 15


def test_it_embeds_as_hindsight_api_does(environment: Environment, made: model.Model, upstream: Upstream) -> None:
    environ = {
        f"{A}EMBEDDINGS_ONNX_OUTPUT_NAME": "sentence_embedding",
        f"{A}EMBEDDINGS_ONNX_DEVICE": "cpu",
        f"{A}LLM_PROVIDER": "openai",
        f"{A}RERANKER_PROVIDER": "cohere",
    }
    env = for_embedding(Settings(), made, upstream, Machine(2 * GIB, 3), environ, IDENTITY)
    of_the_server = environment(environ)
    assert {name for name in of_the_server if "EMBEDDINGS" in name} <= set(env)
    different = {name: value for name, value in env.items() if of_the_server[name] != value}
    assert different == {f"{A}LLM_PROVIDER": "none", f"{A}RERANKER_PROVIDER": "rrf"}


# Names ---------------------------------------------------------------------------------------------------------


def test_a_typo_is_refused_with_the_name_that_was_meant(environment: Environment) -> None:
    (told,) = faults(environment, {f"{A}LLM_PROVIDR": "openai"})
    assert told == f"{A}LLM_PROVIDR is not a variable that hindsight-api 1.1.0 reads; did you mean {A}LLM_PROVIDER?"


def test_an_unknown_name_like_none_is_passed(environment: Environment) -> None:
    assert environment({f"{A}SOMETHING_OF_AN_EXTENSION": "1"})[f"{A}SOMETHING_OF_AN_EXTENSION"] == "1"


def test_one_of_a_numbered_series_is_no_typo(environment: Environment) -> None:
    assert environment({f"{A}LLM_1_MODEL": "m", f"{A}LLM_MODEL_2": "m"})[f"{A}LLM_1_MODEL"] == "m"


@pytest.mark.parametrize("name", ["KEY", "TOKEN", "URL"])
def test_the_clients_names_are_tolerated(name: str, environment: Environment) -> None:
    assert environment({A + name: "http://127.0.0.1:8888"})


def test_faults_of_all_kinds_come_at_once(environment: Environment) -> None:
    told = faults(
        environment,
        {f"{A}PORT": "1", f"{A}READ_DATABASE_URL": "x", f"{A}RERANKER_PROVIDER": "local", f"{A}LLM_PROVIDR": "x"},
    )
    assert len(told) == 4


def test_given_takes_its_prefix_alone() -> None:
    assert given({"HINDSIGHT_API_A": "1", "HINDSIGHT_SIDECAR_B": "2", "XHINDSIGHT_API_C": "3"}) == {
        "HINDSIGHT_API_A": "1"
    }


def test_check_needs_no_model(upstream: Upstream) -> None:
    assert check({}, {}, upstream) == []


# hindsight 0.8 -------------------------------------------------------------------------------------------------


def test_the_tokenizer_table_of_0_8(installed: Installed) -> None:
    old = installed("0.8.4")
    table = tokenizer_table(Settings(), old)
    expected = str(old.package.parent / "litellm/litellm_core_utils/tokenizers")
    assert table == {"TIKTOKEN_CACHE_DIR": expected, "CUSTOM_TIKTOKEN_CACHE_DIR": expected}
    own = tokenizer_table(Settings(tokenizer_dir=Path("/opt/models/cl100k_base")), old)
    assert set(own.values()) == {"/opt/models/cl100k_base"}
    assert tokenizer_table(Settings(), installed("1.1.0")) == {}


# Directories ---------------------------------------------------------------------------------------------------


def test_the_working_directory_has_an_empty_dotenv_so_that_no_other_is_read(tmp_path: Path) -> None:
    for _ in range(2):
        directory = make_directories(tmp_path)
        assert [path.name for path in directory.iterdir()] == [".env"]
        assert (directory / ".env").read_text() == ""
        assert directory.stat().st_mode & 0o777 == 0o500
        assert (tmp_path / "scratch").stat().st_mode & 0o777 == 0o700
    assert api_environment.DATABASE == "hindsight"
