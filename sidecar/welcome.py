"""What `make run` tells a person once the sidecar is ready."""

from sidecar.settings import Settings
from sidecar.status import Picture


def text(settings: Settings, picture: Picture, *, has_llm: bool, program: str) -> str:
    """Return addresses, where the memories are, the model in use, and three commands to try."""
    model = picture.model or {}
    bank = f"http://{settings.listen}/v1/default/banks/first"
    lines = [
        "",
        "The memory sidecar is ready.",
        "",
        f"  memory API   http://{settings.listen}      (point the agent here)",
        f"  control      http://{settings.control_listen}      (health, metrics)",
        f"  memories     {picture.memory_count} in {settings.pgdata}",
        f"  model        {model.get('id')}, {model.get('precision')}, {model.get('dimension')} dimensions",
    ]
    if model.get("stand_in"):
        lines += [
            "               This is a STAND-IN, as no model hub could be reached: good for a trial; its memories",
            "               cannot be used with BAAI/bge-small-en-v1.5 later.",
        ]
    if not has_llm:
        lines += [
            "  LLM          none: storing and recalling work, reflect and observations need one",
            "               (HINDSIGHT_API_LLM_PROVIDER, _BASE_URL, _API_KEY, _MODEL)",
        ]
    runner = f"env HINDSIGHT_SIDECAR_RUN_DIR={settings.run_dir} {program}"
    json = "-H 'content-type: application/json'"
    lines += [
        "",
        "Try:",
        "",
        f"  curl -s {bank}/memories {json} \\",
        """       -d '{"items": [{"content": "The spare key is under the blue flower pot."}], "async": false}'""",
        f"  curl -s {bank}/memories/recall {json} \\",
        """       -d '{"query": "Where can I find the key to the house?"}'""",
        f"  {runner} smoke",
        "",
    ]
    return "\n".join(lines)
