"""Recorded output of engines, each line with the second at which it came."""

import pytest

from bake.image.progress import Progress

# podman 4.3: the final stage begins, waits for another one, and goes on.
PODMAN = """\
0 [1/5] STEP 1/1: FROM scratch AS wheels
0 --> 97dc97e3f0d
1 [2/5] STEP 1/3: FROM docker.io/library/debian:forky-slim AS tools
1 [2/5] STEP 2/3: ARG PYTHON=python3.13
1 --> Using cache e3d77b355c39bbc88e1e63dbc9ff3c5f75dce7942f158834cf7252c92a9ada0d
1 --> e3d77b355c3
2 [2/5] STEP 3/3: RUN apt-get update -qq     && apt-get install -qqy --no-install-recommends binutils > /dev/null
9 --> f7638beeed2
9 [3/5] STEP 1/2: FROM f7638beeed2e6cc4fa66b441c31b200620e50b308bc5f5874a70813e650fdd13 AS sidecar
10 [3/5] STEP 2/2: RUN with-secrets /build/locks/install ${PYTHON} /opt/sidecar /build/locks/sidecar.txt
22     sidecar: 20 of 32 packages
31     sidecar: unpacking
40     +14.5 MB  sidecar: bytecode
41 --> 386aa7045be
41 [5/5] STEP 1/3: FROM scratch
42 [5/5] STEP 2/3: COPY --from=code /overlay/ /
43 [4/5] STEP 1/2: FROM 386aa7045beca1f19a0fef3f2b128cf4adba7580947f99d36ea61d0fdb98c21f AS code
43 [4/5] STEP 2/2: RUN /build/env/bin/python -m pip wheel --quiet --wheel-dir /build/wheel /build/source
47   WARNING: The scripts hindsight-bake and hindsight-sidecar are installed in '/overlay' which is not on PATH.
50 --> 36937cdd42a
50 [5/5] STEP 3/3: LABEL "org.opencontainers.image.title"="hindsight-sidecar"
52 [5/5] COMMIT hindsight-sidecar:1.1.0-onnx
53 --> b95ad3164c7
53 Successfully tagged localhost/hindsight-sidecar:1.1.0-onnx
54 b95ad3164c7fc10c3ea5b15af24dd5cdd9e26a9e8eef9a0b7715ccf52d998871
"""

# docker --progress=plain: steps run side by side, and the final stage has a number for a name.
DOCKER = """\
0 #0 building with "default" instance using docker driver
0
0 #1 [internal] load build definition from Containerfile
0 #1 transferring dockerfile: 6.65kB done
0 #1 DONE 0.0s
0
1 #2 [internal] load metadata for docker.io/library/debian:forky-slim
1 #2 DONE 0.9s
1
1 #3 [tools 1/3] FROM docker.io/library/debian:forky-slim@sha256:eea974491fd979629f2ee794d2ca35c96ada02b8a5e4ab9
1 #3 resolve docker.io/library/debian:forky-slim@sha256:eea974491fd979629f2ee794d2ca35c96ada02b8a5e4ab9 done
2 #3 sha256:6b89f8d1f76077c65bc0240bed5abb2db1bb2ebd71a3f0d8f060b40bf91627b3 12.58MB / 29.78MB 0.8s
3 #3 extracting sha256:6b89f8d1f76077c65bc0240bed5abb2db1bb2ebd71a3f0d8f060b40bf91627b3 0.9s done
3 #3 DONE 2.0s
3
3 #5 [tools 2/3] RUN apt-get update -qq     && apt-get install -qqy --no-install-recommends binutils > /dev/null
3 #5 CACHED
3
3 #12 [api 3/4] RUN with-secrets /build/locks/install python3.13 /opt/hindsight-api
9 #12 5.531     hindsight-api: 20 of 192 packages
9 #12 ...
9
9 #13 [system 2/4] RUN apt-get install -qqy --no-install-recommends postgresql-18 > /dev/null
12 #13 1.204 debconf: falling back to frontend: Noninteractive
13 #13 DONE 4.5s
13
13 #12 [api 3/4] RUN with-secrets /build/locks/install python3.13 /opt/hindsight-api
35 #12 31.53     hindsight-api: unpacking
36 #12 DONE 33.2s
36
36 #14 [api 4/4] RUN /opt/hindsight-api/bin/python /build/cpu_only.py
38 #14 DONE 1.3s
38
38 #20 [stage-4 1/2] COPY --from=system / /
40 #20 DONE 2.0s
40
40 #25 exporting to image
40 #25 exporting layers
41 #25 exporting layers 1.2s done
41 #25 writing image sha256:b95ad3164c7fc10c3ea5b15af24dd5cdd9e26a9e8eef9a0b7715ccf52d998871 done
41 #25 naming to docker.io/library/hindsight-sidecar:1.1.0-onnx done
41 #25 DONE 1.3s
"""


def read(log: str) -> tuple[Progress, list[str]]:
    """Return where it ends, and what a person saw."""
    now = 0.0
    progress = Progress(lambda: now)
    told = []
    for line in log.splitlines():
        second, _, printed = line.partition(" ")
        now = float(second)
        told.append(progress.read(printed))
    progress.end()
    return progress, [line for line in told if line is not None]


def test_podman_a_person_sees_stages_and_what_their_steps_say() -> None:
    assert read(PODMAN)[1] == [
        "==> wheels",
        "==> tools",
        "==> sidecar",
        "    sidecar: 20 of 32 packages",
        "    sidecar: unpacking",
        "    +14.5 MB  sidecar: bytecode",
        "==> image",
        "==> code",
        "    WARNING: The scripts hindsight-bake and hindsight-sidecar are installed in '/overlay' which is not on PATH.",
        "    Successfully tagged localhost/hindsight-sidecar:1.1.0-onnx",
    ]


def test_podman_seconds_of_a_stage_that_comes_back_add_up() -> None:
    progress, _ = read(PODMAN)
    assert progress.seconds == {"wheels": 1.0, "tools": 8.0, "sidecar": 32.0, "image": 6.0, "code": 7.0}
    assert list(progress.seconds) == ["wheels", "tools", "sidecar", "image", "code"]
    assert progress.stage == ""


def test_podman_a_single_stage_has_no_number() -> None:
    progress, told = read("0 STEP 1/2: FROM docker.io/library/debian:forky-slim\n3 STEP 2/2: RUN true\n5 COMMIT x\n")
    assert progress.seconds == {"image": 5.0}
    assert told == ["==> image"]


def test_podman_the_error_is_seen_and_the_stage_that_failed_is_counted() -> None:
    log = (
        "0 [1/2] STEP 1/2: FROM docker.io/library/debian:forky-slim AS snapshot\n"
        "1 [1/2] STEP 2/2: RUN with-secrets /build/snapshot-models /opt/models\n"
        "3 hindsight-bake: the model hub cannot be reached\n"
        '4 Error: building at STEP "RUN with-secrets": while running runtime: exit status 3\n'
    )
    progress, told = read(log)
    assert told == [
        "==> snapshot",
        "    hindsight-bake: the model hub cannot be reached",
        '    Error: building at STEP "RUN with-secrets": while running runtime: exit status 3',
    ]
    assert progress.seconds == {"snapshot": 4.0}


def test_the_stage_that_is_being_built_is_known_meanwhile() -> None:
    progress = Progress(lambda: 0.0)
    progress.read("[3/9] STEP 1/2: FROM docker.io/library/debian:forky-slim AS tools")
    assert progress.stage == "tools"


@pytest.mark.parametrize("line", ["", "   ", "--> 36937cdd42a", "[10/10] COMMIT x:1", "COMMIT", "0" * 64])
def test_noise_is_not_seen(line: str) -> None:
    assert Progress(lambda: 0.0).read(line) is None


@pytest.mark.parametrize("line", ["ok    files: 10 files", "0" * 63, "# a comment", "STEP by step"])
def test_what_only_looks_like_noise_is_seen(line: str) -> None:
    assert Progress(lambda: 0.0).read(line) == f"    {line}"


def test_docker_seconds_are_those_of_the_stages_steps() -> None:
    seconds = read(DOCKER)[0].seconds
    assert {stage: seconds[stage] for stage in ("tools", "system")} == {"tools": 2.0, "system": 4.5}
    assert seconds["api"] == pytest.approx(34.5)
    assert len(seconds) == 4


def test_docker_the_final_stage_has_the_name_that_podman_gives_it() -> None:
    assert read(DOCKER)[0].seconds["image"] == 2.0


def test_docker_a_person_sees_what_the_steps_say_and_nothing_else() -> None:
    assert [line for line in read(DOCKER)[1] if not line.startswith("==> ")] == [
        "    hindsight-api: 20 of 192 packages",
        "    debconf: falling back to frontend: Noninteractive",
        "    hindsight-api: unpacking",
    ]


def test_docker_a_person_sees_stages() -> None:
    told = [line for line in read(DOCKER)[1] if line.startswith("==> ")]
    assert told == ["==> tools", "==> api", "==> system", "==> image"]


def test_docker_padded_numbers_of_steps() -> None:
    progress, _ = read("0 #5 [tools  1/10] FROM docker.io/library/debian:forky-slim\n1 #5 DONE 1.0s\n")
    assert progress.seconds == {"tools": 1.0}
