import structlog

from sidecar.attempts import BURST, Attempts


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_some_wrong_ones_are_answered_in_full_and_then_one_a_second() -> None:
    clock = Clock()
    attempts = Attempts("127.0.0.1:8888", clock)
    assert [attempts.retry_after() for _ in range(BURST + 2)] == [None] * BURST + [1, 1]
    clock.now += 0.5
    assert attempts.retry_after() == 1
    clock.now += 0.5
    assert [attempts.retry_after() for _ in range(2)] == [None, 1]


def test_it_recovers_and_no_further_than_where_it_began() -> None:
    clock = Clock()
    attempts = Attempts("127.0.0.1:8888", clock)
    while attempts.retry_after() is None:
        pass
    clock.now += 86400
    assert [attempts.retry_after() for _ in range(BURST + 1)] == [None] * BURST + [1]


def test_a_log_line_tells_of_it_once_a_minute() -> None:
    clock = Clock()
    with structlog.testing.capture_logs() as lines:
        attempts = Attempts("127.0.0.1:8888", clock)
        for _ in range(3):
            for _ in range(1000):
                attempts.retry_after()
            clock.now += 31
    assert [(line["event"], line["address"]) for line in lines] == [
        ("too many wrong tokens or keys", "127.0.0.1:8888")
    ] * 2
