"""The environments of hindsight-api and of what embeds as it does: built name by name, and nothing inherited by accident."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from sidecar import environment
from sidecar.errors import SettingsError
from sidecar.model import Model, read_reranker
from sidecar.settings import Settings
from sidecar.sizing import API_POOL, Machine
from sidecar.upstream import Upstream, known_names

DATABASE = "hindsight"
ROLE = "hindsight"
# hindsight 0.8 passes its URL through a config parser that stops at any `%`, so the socket's path goes into PGHOST.
DATABASE_URL = f"postgresql://{ROLE}@/{DATABASE}"
# The hostname, its default, changes with every container, and tasks of the old name would never be taken up again.
WORKER_ID = "hindsight-sidecar"

# What LLM providers and networks need, and what is nobody's secret.
_PASSED_PREFIXES = (
    "ANTHROPIC_",
    "AWS_",
    "AZURE_",
    "CLAUDE_",
    "GEMINI_",
    "GOOGLE_",
    "LC_",
    "OPENAI_",
    "OTEL_",
    "VERTEX",
)
_PASSED = frozenset(
    {
        "ALL_PROXY",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "LANG",
        "NO_PROXY",
        "REQUESTS_CA_BUNDLE",
        "SSL_CERT_DIR",
        "SSL_CERT_FILE",
        "TZ",
    }
)
# Read by hindsight's client, and so perhaps set for a whole pod.
_THE_CLIENTS = frozenset({"HINDSIGHT_API_KEY", "HINDSIGHT_API_TOKEN", "HINDSIGHT_API_URL"})
# How an operator may have it embed: its vectors follow from these, and none is anybody's secret.
_OF_EMBEDDING = frozenset(
    f"{environment.API_PREFIX}EMBEDDINGS_{name}"
    for name in (
        "LOCAL_TRUST_REMOTE_CODE",
        "ONNX_BATCH_SIZE",
        "ONNX_CPU_MEM_ARENA",
        "ONNX_CUDA_DEVICE_ID",
        "ONNX_DEVICE",
        "ONNX_OUTPUT_NAME",
    )
)
_TYPO = 0.85  # likeness from which an unknown name is a known one mis-spelt
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "ORT_DISABLE_TELEMETRY": "1",  # onnxruntime calls home some ten seconds after the start otherwise
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # three tries at a download on import otherwise
}


def owned(settings: Settings, model: Model) -> dict[str, str]:
    """Return the `HINDSIGHT_API_*` variables that the sidecar decides.

    Raises:
        BlockedError: `model-missing`, where a reranker is set and not there.

    """
    values = {
        "HOST": settings.api_listen.host,
        "PORT": str(settings.api_listen.port),
        "DATABASE_URL": DATABASE_URL,
        "DATABASE_BACKEND": "postgresql",
        "RUN_MIGRATIONS_ON_STARTUP": "true",
        "DB_POOL_MAX_SIZE": str(API_POOL),
        "WORKERS": "1",
        "ENABLE_BANK_CONFIG_API": "true",  # how our own bank is kept from asking an LLM
        "WORKER_ID": WORKER_ID,
        **_embeddings(settings, model),
        **_reranker(settings),
    }
    return _named(values)


def _named(values: Mapping[str, str]) -> dict[str, str]:
    return {f"{environment.API_PREFIX}{name}": value for name, value in values.items()}


def _embeddings(settings: Settings, model: Model) -> dict[str, str]:
    if settings.flavor == "torch":
        return {
            "EMBEDDINGS_PROVIDER": "local",
            "EMBEDDINGS_LOCAL_MODEL": str(model.directory),
            "EMBEDDINGS_LOCAL_FORCE_CPU": "true",
        }
    identity = model.identity
    return {
        "EMBEDDINGS_PROVIDER": "onnx",
        "EMBEDDINGS_ONNX_MODEL_ID": identity.id,
        "EMBEDDINGS_ONNX_MODEL_PATH": str(model.directory / model.weights),
        "EMBEDDINGS_ONNX_TOKENIZER_NAME_OR_PATH": str(model.directory),
        "EMBEDDINGS_ONNX_DIMENSIONS": str(identity.dimension),
        "EMBEDDINGS_ONNX_MAX_TOKENS": str(model.max_tokens),
        "EMBEDDINGS_ONNX_POOLING": identity.pooling,
        "EMBEDDINGS_ONNX_NORMALIZE": str(identity.normalize).lower(),
        # Their defaults are E5's, and every vector would be a little wrong with everything healthy.
        "EMBEDDINGS_ONNX_QUERY_PREFIX": identity.query_prefix,
        "EMBEDDINGS_ONNX_PASSAGE_PREFIX": identity.passage_prefix,
    }


def _reranker(settings: Settings) -> dict[str, str]:
    if settings.reranker_dir is None:
        return {}
    baked = read_reranker(settings.reranker_dir, settings.flavor)
    if settings.flavor == "torch":
        return {
            "RERANKER_PROVIDER": "local",
            "RERANKER_LOCAL_MODEL": str(baked.directory),
            "RERANKER_LOCAL_FORCE_CPU": "true",
        }
    return {
        "RERANKER_PROVIDER": "onnx",
        "RERANKER_ONNX_MODEL_PATH": str(baked.directory / baked.weights),
        "RERANKER_ONNX_TOKENIZER_NAME_OR_PATH": str(baked.directory),
        "RERANKER_ONNX_MAX_TOKENS": str(baked.max_tokens),
    }


def defaults() -> dict[str, str]:
    """Return the `HINDSIGHT_API_*` variables that an operator may set otherwise."""
    return {
        "HINDSIGHT_API_RERANKER_PROVIDER": "rrf",  # needs no second model
        "HINDSIGHT_API_LLM_PROVIDER": "none",
        # It asks the LLM something at each start and waits for minutes where no answer comes; memories need none.
        "HINDSIGHT_API_SKIP_LLM_VERIFICATION": "true",
    }


def has_llm(environ: Mapping[str, str]) -> bool:
    """Tell whether the operator configured an LLM: anything about one, and not that there is none."""
    names = [name for name in environ if name.startswith("HINDSIGHT_API_LLM_") and "_TRACE_" not in name]
    return bool(names) and environ.get("HINDSIGHT_API_LLM_PROVIDER", "").lower() != "none"


def check(given: Mapping[str, str], decided: Mapping[str, str], upstream: Upstream) -> list[str]:
    """Return one sentence for each `HINDSIGHT_API_*` variable that cannot be passed on.

    An equal value of one that the sidecar decides is fine.
    """
    faults = [
        f"{name} is {_shown(name, given[name])}, and the sidecar decides it ({value!r}); unset it"
        for name, value in decided.items()
        if name in given and given[name] != value
    ]
    others = [name for name in sorted(given) if name.endswith(environment.DATABASE_ENDINGS) and name not in decided]
    faults += [f"{name} is set, and the sidecar brings its own database; unset it" for name in others]
    if given.get("HINDSIGHT_API_RERANKER_PROVIDER") == "local" and "HINDSIGHT_API_RERANKER_PROVIDER" not in decided:
        faults.append(
            "HINDSIGHT_API_RERANKER_PROVIDER is 'local', and no reranker is baked; bake one and set "
            "HINDSIGHT_SIDECAR_RERANKER_DIR, or leave it at 'rrf'"
        )
    if decided.get("HINDSIGHT_API_RERANKER_PROVIDER") == "onnx" and upstream.is_0_8:
        faults.append(
            f"HINDSIGHT_SIDECAR_RERANKER_DIR is set, and hindsight-api {upstream.version} loads a reranker with torch alone; "
            "unset it (rrf needs no model), or use the torch flavour, or 1.1.0"
        )
    claude = [name for name in sorted(given) if name.endswith("LLM_PROVIDER") and given[name].lower() == "claude-code"]
    if claude and not _has_claude(upstream):
        faults.append(
            f"{' and '.join(claude)} is 'claude-code', and the program that it runs, claude, is not here; build the image "
            f"with KEEP_CLAUDE_CLI=1, or put the program into a directory of {program_path(upstream)}, or use another provider"
        )
    undecided = set(given) - set(decided) - _THE_CLIENTS
    known = known_names(upstream) | set(decided) if undecided else set()
    faults += [
        f"{name} is not a variable that hindsight-api {upstream.version} reads; did you mean {close}?"
        for name in sorted(set(given) - known - _THE_CLIENTS - set(others))
        if not any(
            part.isdigit() for part in name.split("_")
        )  # one of a numbered series, spelt in the sources otherwise
        and (close := environment.nearest(name, known, _TYPO))
    ]
    return faults


def _shown(name: str, value: str) -> str:
    """Return a value as a fault may tell it: the URL of a database may have a password in it."""
    hidden = name.endswith(environment.DATABASE_ENDINGS) and ("@" in value or "password" in value.lower())
    return "another one" if hidden else repr(value)


def _has_claude(upstream: Upstream) -> bool:
    """Tell whether its Python package still has the program (the image leaves it out: 400 MB), or the PATH has it."""
    bundled = upstream.package.parent / "claude_agent_sdk/_bundled/claude"
    return bundled.is_file() or shutil.which("claude", path=program_path(upstream)) is not None


def program_path(upstream: Upstream) -> str:
    """Return hindsight-api's PATH."""
    return f"{upstream.venv / 'bin'}:/usr/local/bin:/usr/bin:/bin"


def given(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the `HINDSIGHT_API_*` variables of an environment."""
    return {name: value for name, value in environ.items() if name.startswith(environment.API_PREFIX)}


def build(
    settings: Settings,
    model: Model,
    upstream: Upstream,
    machine: Machine,
    environ: Mapping[str, str],
    identity: Mapping[str, str],
) -> dict[str, str]:
    """Return hindsight-api's whole environment.

    `environ` is the sidecar's own, without service links; `identity` names the user (`users.identity_environment`).

    Raises:
        SettingsError: naming every variable that cannot be passed on.

    """
    decided = owned(settings, model)
    asked = given(environ)
    faults = check(asked, decided, upstream)
    if faults:
        raise SettingsError(*faults)
    passed = {
        name: value
        for name, value in environ.items()
        if name.startswith(_PASSED_PREFIXES) or name.upper() in _PASSED or name in settings.pass_env
    }
    base = defaults()
    if has_llm(asked):
        del base["HINDSIGHT_API_LLM_PROVIDER"]  # an operator who configures an LLM gets hindsight's own default of it
    return {
        **passed,
        **base,
        **asked,
        **decided,
        **_surroundings(settings, upstream, machine, identity),
        "API_VENV": str(settings.api_venv),
        "PGHOST": str(settings.run_dir),
    }


def for_embedding(
    settings: Settings,
    model: Model,
    upstream: Upstream,
    machine: Machine,
    environ: Mapping[str, str],
    identity: Mapping[str, str],
) -> dict[str, str]:
    """Return the environment of a process that embeds as hindsight-api does, and does nothing else of it: no secret is in it.

    The arguments are those of `build`, which has refused what cannot be passed on.
    """
    return {
        **{name: value for name, value in environ.items() if name in _OF_EMBEDDING},
        **defaults(),  # without an LLM and a reranker, whatever hindsight-api has
        **_named(_embeddings(settings, model)),
        **_surroundings(settings, upstream, machine, identity),
    }


def _surroundings(
    settings: Settings, upstream: Upstream, machine: Machine, identity: Mapping[str, str]
) -> dict[str, str]:
    """Return what everything that runs with hindsight-api's interpreter needs to know of where it is."""
    scratch = settings.run_dir / "scratch"
    threads = str(machine.cores)
    return {
        **_OFFLINE,
        **tokenizer_table(settings, upstream),
        **identity,
        "PATH": program_path(upstream),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "HF_HOME": str(scratch / "huggingface"),
        "MPLCONFIGDIR": str(scratch / "matplotlib"),
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "torchinductor"),
        # A cgroup's quota is not seen by these libraries: they start a thread for every core of the machine.
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }


def tokenizer_table(settings: Settings, upstream: Upstream) -> dict[str, str]:
    """Return where hindsight 0.8 finds its tokenizer table; without it the start ends in a download."""
    if not upstream.is_0_8:
        return {}
    directory = settings.tokenizer_dir or upstream.package.parent / "litellm/litellm_core_utils/tokenizers"
    # litellm puts its own directory there when it is imported first, unless the second name is set.
    return {"TIKTOKEN_CACHE_DIR": str(directory), "CUSTOM_TIKTOKEN_CACHE_DIR": str(directory)}


def make_directories(run_dir: Path) -> Path:
    """Make the scratch directories, and return the working directory for hindsight-api.

    It reads the nearest `.env` from there upwards over its environment, so the nearest is an empty one of ours.
    """
    (run_dir / "scratch").mkdir(mode=0o700, exist_ok=True)
    empty = run_dir / "empty"
    if not empty.exists():
        empty.mkdir(mode=0o700)
        (empty / ".env").touch(0o400)
        empty.chmod(0o500)
    return empty
