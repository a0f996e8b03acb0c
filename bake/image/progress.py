"""Reads what an engine prints while it builds: which stage it is in, and for how long."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

# podman and buildah: "[3/9] STEP 2/8: RUN ..."; the first step of a stage names it.
_STEP = re.compile(r"^(?:\[(\d+)/\d+\] )?STEP \d+/\d+: (.*)$")
_NAMED = re.compile(r"^FROM .* AS (\S+)$", re.IGNORECASE)
# docker with --progress=plain: "#12 [api 3/4] RUN ...", later "#12 DONE 3.2s"
_VERTEX = re.compile(r"^#(\d+) \[(?:(\S+) +)?\d+/\d+\] (.*)$")
_DONE = re.compile(r"^#(\d+) DONE ([\d.]+)s$")
_NOISE = re.compile(
    r"^(-->|COMMIT|\[\d+/\d+\] COMMIT|#\d+ (CACHED|DONE|sha256|transferring|exporting|writing|naming)|[0-9a-f]{64}$)"
)
LAST = "image"  # the final stage has no name of its own


@dataclass
class Progress:
    """Seconds by stage, in the order in which they began.

    Attributes:
        seconds: by stage.
        stage: the one that is being built.

    """

    clock: Callable[[], float]
    seconds: dict[str, float] = field(default_factory=dict)
    stage: str = ""
    _names: dict[str, str] = field(default_factory=dict)
    _vertices: dict[str, str] = field(default_factory=dict)
    _since: float = 0.0

    def read(self, line: str) -> str | None:
        """Take a line in, and return what of it a person wants to see: a new stage, or what a step says."""
        if step := _STEP.match(line):
            return self._enter(self._stage_of(step.group(1) or "", step.group(2)))
        if vertex := _VERTEX.match(line):
            stage = vertex.group(2) or LAST
            stage = LAST if re.fullmatch(r"stage-\d+", stage) else stage
            new = stage not in self._vertices.values()
            self._vertices[vertex.group(1)] = stage
            return f"==> {stage}" if new else None
        if done := _DONE.match(line):
            stage = self._vertices.get(done.group(1))
            if stage:
                self.seconds[stage] = self.seconds.get(stage, 0.0) + float(done.group(2))
            return None
        if re.match(r"#\d+ ", line):
            said = re.match(r"#\d+ \d+\.\d+ (.*)$", line)
            return f"    {said.group(1).strip()}" if said else None
        if _NOISE.match(line) or not line.strip():
            return None
        return f"    {line.strip()}"

    def end(self) -> None:
        """Close the last stage."""
        self._enter("")

    def _stage_of(self, number: str, instruction: str) -> str:
        if instruction.upper().startswith("FROM "):
            named = _NAMED.match(instruction)
            self._names[number] = named.group(1) if named else LAST
        return self._names.get(number, LAST)

    def _enter(self, stage: str) -> str | None:
        now = self.clock()
        if self.stage:
            self.seconds[self.stage] = self.seconds.get(self.stage, 0.0) + now - self._since
        self._since = now
        if stage == self.stage:
            return None
        self.stage = stage
        return f"==> {stage}" if stage and stage not in self.seconds else None
