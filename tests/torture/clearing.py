"""What is done after a failure, before the next round: its evidence is kept, and its subject begins anew."""

import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matrix import Case, LostError, Subject, traced


class Clearing:
    """Keeps what failures left below one directory, each in its own; it is made for the first of them."""

    def __init__(self, directory: Path | None, say: Callable[[str], None]) -> None:
        self._directory = directory
        self._say = say
        self._count = 0

    def after(self, subject: Subject, case: Case, failure: str, error: Exception) -> str:
        """Clear up, none of it left out because another part fails; return what else there is to tell of the failure."""
        told: list[str] = []

        def attempt(what: str, step: Callable[[], object]) -> object:
            try:
                return step()
            except Exception as another:  # noqa: BLE001 - the failure itself has to be told of
                told.append(f"{what} failed: {traced(another)}")
                return None

        # Before it is kept, as a whole home is kept once what runs in it has ended.
        evidence = attempt("telling what runs", subject.evidence)
        kept = attempt("making a directory to keep it in", partial(self._next, case))
        if isinstance(kept, Path):
            told.append(f"kept in {kept}\n")
            attempt("keeping it", partial(subject.keep, kept, whole=isinstance(error, LostError)))
        attempt("a new home", subject.new_home)
        more = "".join(told)
        self._say(f"FAILED {case.group}: {case.name} {failure}{more}{evidence or ''}")
        if isinstance(kept, Path):
            attempt("writing why", partial((kept / "why").write_text, f"{failure}{more}{evidence or ''}\n"))
        return more

    def _next(self, case: Case) -> Path:
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="torture-", dir="/var/tmp"))
        self._count += 1
        name = re.sub(r"[^0-9A-Za-z]+", "-", f"{case.group} {case.name}")
        kept = self._directory / f"{self._count}-{name}"
        while kept.exists():  # of an earlier run
            self._count += 1
            kept = self._directory / f"{self._count}-{name}"
        kept.mkdir(parents=True)
        return kept
