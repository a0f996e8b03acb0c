"""Every setting of the sidecar; docs/settings.md is the table, and a test compares the two."""

import ipaddress
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from sidecar import environment, paths
from sidecar.errors import SettingsError
from sidecar.schedule import Times

SOCKET_PATH_MAX = 107  # bytes of sockaddr_un.sun_path, less the terminating NUL
_PORT_MAX = 65535
_SENDABLE = re.compile(r"[!-~]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)


class Address(NamedTuple):
    """A TCP address to listen on."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this network namespace can reach it."""
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback


def _parse_address(value: object) -> object:
    if not isinstance(value, str):
        return value
    host, _, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if (
        not host
        or not (port.isascii() and port.isdigit() and len(port) <= len(str(_PORT_MAX)))
        or not 0 < int(port) <= _PORT_MAX
    ):
        raise ValueError(f"{value!r} is not an address; expected HOST:PORT, such as 127.0.0.1:8888")
    if host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"{host!r} is not an IP address; expected one, or localhost") from None
    return Address(host, int(port))


def _parse_names(value: object) -> object:
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _blank_is_none(value: object) -> object:
    return None if value == "" else value


def _parse_schedule(value: object) -> object:
    if not isinstance(value, str):
        return value
    return Times.parse(value, datetime.now(UTC)).expression if value.strip() else None


def _readable(value: object) -> object:
    if isinstance(value, SettingsError):
        raise ValueError(str(value))  # noqa: TRY004 - pydantic collects these
    return value


ListenAddress = Annotated[Address, NoDecode, BeforeValidator(_parse_address)]
OptionalListenAddress = Annotated[
    Address | None, NoDecode, BeforeValidator(lambda value: _parse_address(value) if value else None)
]
Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_parse_names)]
Secret = Annotated[SecretStr | None, BeforeValidator(_readable)]
OptionalPath = Annotated[Path | None, BeforeValidator(_blank_is_none)]
OptionalSeconds = Annotated[Annotated[float, Field(gt=0, allow_inf_nan=False)] | None, BeforeValidator(_blank_is_none)]
OptionalDays = Annotated[Annotated[float, Field(gt=0, le=36500)] | None, BeforeValidator(_blank_is_none)]
OptionalSchedule = Annotated[str | None, BeforeValidator(_parse_schedule)]

Level = Literal["debug", "info", "warning", "error"]


class SecretFiles(PydanticBaseSettingsSource):
    """Reads `HINDSIGHT_SIDECAR_<SECRET>_FILE`, as mounted secrets come."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """Return the content of the file that the variable names, without its final newline; else what is wrong with it."""
        path = os.environ.get(f"{environment.PREFIX}{field_name.upper()}_FILE") if is_secret(field) else None
        if path is None:
            return None, field_name, False
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            name = f"{environment.PREFIX}{field_name.upper()}_FILE"
            fault = SettingsError(f"{name} names {path}, which cannot be read ({error}); mount the secret there")
            return fault, field_name, False  # told with all other faults
        return text.removesuffix("\n").removesuffix("\r"), field_name, False

    def __call__(self) -> dict[str, Any]:
        """Return the values of every secret that has a file."""
        found = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: value for name, value in found.items() if value is not None}


def is_secret(field: FieldInfo) -> bool:
    """Tell whether a field holds a secret and so may come from a file."""
    return "SecretStr" in str(field.annotation)


class Settings(BaseSettings):
    """What the operator decides. Times are in seconds, sizes in bytes."""

    model_config = SettingsConfigDict(env_prefix=environment.PREFIX, extra="ignore", frozen=True)

    listen: ListenAddress = Address("127.0.0.1", 8888)
    control_listen: ListenAddress = Address("127.0.0.1", 8890)
    metrics_listen: OptionalListenAddress = None
    api_listen: ListenAddress = Address("127.0.0.1", 8887)
    api_key: Secret = None
    token: Secret = None
    source_token: Secret = None
    tenant_key: Secret = None
    allowed_hosts: Names = ()
    allowed_origins: Names = ()

    pgdata: Path = Field(default=Path(paths.PGDATA), validation_alias="PGDATA")
    run_dir: Path = Path(paths.RUN_DIR)
    pg_bindir: OptionalPath = None
    run_as: str | None = None
    ephemeral: bool = False

    api_venv: Path = Path(paths.API_VENV)
    flavor: Literal["onnx", "torch"] = "onnx"
    model_dir: Path = Path(paths.MODEL_DIR)
    reranker_dir: OptionalPath = None
    tokenizer_dir: OptionalPath = None
    pass_env: Names = ()
    upgrade_copy: bool = True

    dump_schedule: OptionalSchedule = None
    dump_keep: int = Field(default=7, ge=1)
    dump_keep_days: OptionalDays = None

    stop_grace: float = Field(default=9.0, ge=1, le=600)
    blocked_exit_after: OptionalSeconds = None
    api_hung_after: float = Field(default=60.0, ge=5, allow_inf_nan=False)
    gateway_timeout: float = Field(default=300.0, ge=1, allow_inf_nan=False)

    log_format: Literal["console", "json"] = "console"
    log_level: Level = "info"
    child_log_level: Level = "info"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - the signature is pydantic's
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take arguments, the environment and secret files; never a `.env` that happens to lie about."""
        return init_settings, env_settings, SecretFiles(settings_cls)

    @field_validator("pgdata", "run_dir", "api_venv", "model_dir", "pg_bindir", "reranker_dir", "tokenizer_dir")
    @classmethod
    def _absolute(cls, value: Path | None) -> Path | None:
        if value is not None and not value.is_absolute():
            raise ValueError(f"{str(value)!r} is a relative path; expected an absolute one")
        return value

    @field_validator("api_key", "token", "source_token", "tenant_key")
    @classmethod
    def _not_blank(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not value.get_secret_value().strip():
            raise ValueError("the secret is empty; set a value, or unset the variable")
        if value is not None and not _SENDABLE.fullmatch(value.get_secret_value()):
            raise ValueError("the secret has characters that no HTTP header can carry; use visible ASCII alone")
        return value

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is no origin; expected SCHEME://HOST[:PORT], without a path")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        faults = []
        if not self.listen.is_loopback and self.api_key is None:
            faults.append(
                f"HINDSIGHT_SIDECAR_LISTEN is {self.listen}, which others than this pod can reach; "
                "set HINDSIGHT_SIDECAR_API_KEY as well, or listen on 127.0.0.1"
            )
        if not self.control_listen.is_loopback:
            faults.append(
                f"HINDSIGHT_SIDECAR_CONTROL_LISTEN is {self.control_listen}; the control API stays on loopback "
                "(HINDSIGHT_SIDECAR_METRICS_LISTEN is for a scraper outside the pod)"
            )
        if not self.api_listen.is_loopback:
            faults.append(f"HINDSIGHT_SIDECAR_API_LISTEN is {self.api_listen}; hindsight-api stays on loopback")
        taken: dict[Address, str] = {}
        for name in ("listen", "control_listen", "metrics_listen", "api_listen"):
            address = getattr(self, name)
            if address in taken:
                faults.append(
                    f"{environment.PREFIX}{taken[address]} and {environment.PREFIX}{name.upper()} are both {address}; "
                    "give each an address of its own"
                )
            elif address is not None:
                taken[address] = name.upper()
        length = len(os.fsencode(self.side_directory / paths.POSTGRES_SOCKET))
        if length > SOCKET_PATH_MAX:
            faults.append(
                f"HINDSIGHT_SIDECAR_RUN_DIR makes a socket path of {length} bytes, and {SOCKET_PATH_MAX} are possible; "
                "choose a shorter directory"
            )
        if self.pgdata.parent == self.pgdata or self.run_dir.is_relative_to(self.pgdata):
            faults.append(
                f"PGDATA is {self.pgdata}; expected a subdirectory of the volume, not holding the run directory"
            )
        if faults:
            raise ValueError("\n".join(faults))
        return self

    @property
    def volume(self) -> Path:
        """The directory that is mounted; PGDATA is a subdirectory of it."""
        return self.pgdata.parent

    @property
    def side_directory(self) -> Path:
        """Where the socket of a server beside the served one goes; the longest of our socket paths."""
        return self.run_dir / "side"

    @property
    def control_socket(self) -> Path:
        """Where the control API listens for whoever may open it."""
        return self.run_dir / "control.sock"


def setting_names() -> dict[str, str]:
    """Map every field of `Settings` to the variable it is read from."""
    return {
        name: str(field.validation_alias or f"{environment.PREFIX}{name.upper()}")
        for name, field in Settings.model_fields.items()
    }


def secret_names() -> list[str]:
    """Return the variables that may also be given as `*_FILE`."""
    return [setting_names()[name] for name, field in Settings.model_fields.items() if is_secret(field)]


def _sentences(error: ValidationError) -> list[str]:
    names = setting_names()
    found = []
    for item in error.errors():
        message = item["msg"].removeprefix("Value error, ")
        where = names.get(str(item["loc"][0]), str(item["loc"][0])) if item["loc"] else ""
        found += [f"{where}: {message}" if where else line for line in message.splitlines()]
    return found


def _between(error: ValidationError) -> list[str]:
    """Return the faults between settings: they are looked at once each is right by itself, so the wrong ones get a stand-in."""
    fields = {str(field.validation_alias or name): field for name, field in Settings.model_fields.items()}
    wrong = {str(item["loc"][0]) for item in error.errors() if item["loc"]}
    stand_ins: dict[str, Any] = {
        name: SecretStr("faulty") if is_secret(fields[name]) else fields[name].default for name in wrong
    }
    if wrong:
        try:
            Settings(**stand_ins)
        except ValidationError as more:
            return _sentences(more)
    return []


def load(environ: Mapping[str, str]) -> tuple[Settings, environment.Sorted]:
    """Read the settings from this process' environment.

    Raises:
        SettingsError: with every fault at once.

    """
    ours = [name for name in setting_names().values() if name.startswith(environment.PREFIX)]
    found = environment.sort(environ, ours, secret_names())
    faults = list(found.faults)
    try:
        settings = Settings()
    except ValidationError as error:
        raise SettingsError(*faults, *_sentences(error), *_between(error)) from None
    if faults:
        raise SettingsError(*faults)
    return settings, found


def masked(settings: Settings) -> dict[str, Any]:
    """Return the settings in effect by variable, without any secret."""
    values = settings.model_dump(mode="json")
    names = setting_names()
    shown = {}
    for name, variable in names.items():
        value = getattr(settings, name)
        shown[variable] = str(value) if isinstance(value, Address) else values[name]
    return shown


def changed(settings: Settings) -> dict[str, str]:
    """Return the settings that are not at their default, by variable and without any secret."""
    shown = masked(settings)
    return {
        variable: str(shown[variable])
        for name, variable in setting_names().items()
        if getattr(settings, name) != Settings.model_fields[name].default
    }
