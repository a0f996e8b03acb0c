"""The decisions, over whatever may happen: the supervisor's effects are played, and its World is the real one."""

from collections.abc import Callable

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sidecar.backoff import CRASH_CEILING, CRASH_WINDOW, End
from sidecar.errors import Reason
from sidecar.machine import (
    CRASH_LOOP_RETRY,
    LABELS,
    Decision,
    Fault,
    Phase,
    Server,
    State,
    Step,
    World,
    decide,
    state_of,
)

HUNG_AFTER = 60.0
RUNNING = (Server.STARTING, Server.RECOVERING, Server.UP, Server.UNRESPONSIVE)


def look(world: World, now: float) -> Decision:
    return decide(world, now, api_hung_after=HUNG_AFTER)


def complete(**changes: object) -> World:
    """Return a world in which nothing is missing."""
    world = World(
        volume_held=True,
        cluster_prepared=True,
        postgres=Server.UP,
        database_checked=True,
        api=Server.UP,
        proved=True,
        ever_ready=True,
    )
    for name, value in changes.items():
        setattr(world, name, value)
    return world


def postgres_died(world: World, now: float) -> None:
    world.postgres_ended()
    world.postgres_restarts.record(now, End.FAILED)


def api_died(world: World, now: float) -> None:
    world.api_ended()
    world.api_restarts.record(now, End.FAILED)


class Played:
    """The supervisor's part: what a step does to the world, as `sidecar.supervisor` does it."""

    def __init__(self) -> None:
        self.world = World()
        self.now = 1000.0

    def succeed(self, step: Step) -> None:
        world = self.world
        if step is Step.TAKE_VOLUME:
            world.volume_held = True
        elif step is Step.PREPARE_CLUSTER:
            world.cluster_prepared = True
        elif step is Step.START_POSTGRES:
            world.postgres = Server.STARTING
        elif step is Step.CHECK_DATABASE:
            world.database_checked = True
        elif step is Step.START_API:
            world.api = Server.STARTING
        elif step is Step.REPLACE_API:
            api_died(world, self.now)
        elif step is Step.PROVE:
            world.proved = True
        world.fault = None

    def see_postgres(self, server: Server) -> None:
        if self.world.postgres is Server.UP and server is not Server.UP:
            self.world.proved = False
        self.world.postgres = server

    def see_api(self, server: Server) -> None:
        world = self.world
        since_now = world.api is not Server.UNRESPONSIVE or world.postgres is not Server.UP
        if server is Server.UNRESPONSIVE and since_now:
            world.api_unresponsive_since = self.now
            world.proved = False
        elif server is not Server.UNRESPONSIVE:
            world.api_unresponsive_since = None
        world.api = server

    def fair_until_ready(self, most: int) -> list[Step]:
        """Let every step succeed and every wait be answered, until the state is ready."""
        taken = []
        for _ in range(most):
            decision = look(self.world, self.now)
            if decision.step is not Step.WAIT:
                taken.append(decision.step)
                self.succeed(decision.step)
            elif decision.until is not None:
                self.now = decision.until
            elif self.world.postgres is not Server.UP:
                self.see_postgres(Server.UP)
            elif self.world.api is not Server.UP:
                self.see_api(Server.UP)
            else:
                break
        return taken


class Machine(RuleBasedStateMachine):
    """Anything may happen between two steps; what is decided must be right each time."""

    def __init__(self) -> None:
        super().__init__()
        self.played = Played()

    @property
    def world(self) -> World:
        return self.played.world

    @rule(seconds=st.sampled_from([0.01, 0.5, 1.0, 7.0, 30.0, 61.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.played.now += seconds

    @rule()
    def step_succeeds(self) -> None:
        self.played.succeed(look(self.world, self.played.now).step)

    @rule(reason=st.sampled_from([None, *Reason]), seconds=st.sampled_from([0.2, 1.0, 10.0]))
    def step_fails(self, reason: Reason | None, seconds: float) -> None:
        if look(self.world, self.played.now).step not in (Step.WAIT, Step.STOP):
            self.world.fault = Fault(reason, "seen", self.played.now + seconds)

    @precondition(lambda self: self.world.postgres in RUNNING)
    @rule(server=st.sampled_from(RUNNING))
    def postgres_is_seen(self, server: Server) -> None:
        self.played.see_postgres(server)

    @precondition(lambda self: self.world.api in RUNNING)
    @rule(server=st.sampled_from([Server.UP, Server.UNRESPONSIVE]))
    def api_is_seen(self, server: Server) -> None:
        self.played.see_api(server)

    @precondition(lambda self: self.world.postgres in RUNNING)
    @rule(full=st.booleans())
    def postgres_ends(self, *, full: bool) -> None:
        postgres_died(self.world, self.played.now)
        if full:
            self.world.fault = Fault(Reason.NO_SPACE, "full", self.played.now + 10)

    @precondition(lambda self: self.world.api in RUNNING)
    @rule()
    def api_ends(self) -> None:
        api_died(self.world, self.played.now)

    @rule(operation=st.sampled_from([None, "dump"]))
    def maintenance(self, operation: str | None) -> None:
        self.world.maintenance = operation

    @rule(steps=st.integers(1, 20))
    def all_goes_well_for_a_while(self, steps: int) -> None:
        if not self.world.stopping:
            self.played.fair_until_ready(steps)
            self.note_ready()

    @rule()
    def note_ready(self) -> None:
        if state_of(self.world, self.played.now).phase is Phase.READY:
            self.world.ever_ready = True

    @rule(sure=st.integers(0, 15))
    def stop(self, sure: int) -> None:
        self.world.stopping = self.world.stopping or sure == 0

    @invariant()
    def after_stopping_only_stop(self) -> None:
        if self.world.stopping:
            assert look(self.world, self.played.now) == Decision(Step.STOP)
            assert state_of(self.world, self.played.now) == State(Phase.STOPPING)

    @invariant()
    def a_fault_is_waited_out(self) -> None:
        fault = self.world.fault
        if fault is not None and self.played.now < fault.until and not self.world.stopping:
            assert look(self.world, self.played.now) == Decision(Step.WAIT, fault.until)

    @invariant()
    def a_fault_with_a_reason_is_told(self) -> None:
        fault = self.world.fault
        if fault is not None and fault.reason is not None and not self.world.stopping:
            assert state_of(self.world, self.played.now) == State(
                Phase.BLOCKED, fault.reason, "seen" if fault.detail == "seen" else "full"
            )

    @invariant()
    def its_state_is_one_that_is_listed(self) -> None:
        assert state_of(self.world, self.played.now).labels in LABELS

    @invariant()
    def nothing_starts_without_what_it_needs(self) -> None:
        world, now = self.world, self.played.now
        step = look(world, now).step
        if step not in (Step.WAIT, Step.STOP, Step.TAKE_VOLUME):
            assert world.volume_held
        if step in (Step.PREPARE_CLUSTER, Step.START_POSTGRES):
            assert world.postgres is Server.DOWN
            assert now >= world.postgres_restarts.due(now)
        if step is Step.START_POSTGRES:
            assert world.cluster_prepared
        if step is Step.START_API:
            assert world.api is Server.DOWN
            assert now >= world.api_restarts.due(now)
        if step in (Step.START_API, Step.REPLACE_API, Step.PROVE):
            assert world.postgres is Server.UP
            assert world.database_checked
        if step is Step.PROVE:
            assert world.api is Server.UP
        if step is Step.REPLACE_API:
            assert world.api is Server.UNRESPONSIVE
            assert world.api_unresponsive_since is not None
            assert now - world.api_unresponsive_since >= HUNG_AFTER

    @invariant()
    def a_wait_has_an_end_ahead(self) -> None:
        decision = look(self.world, self.played.now)
        assert decision.until is None or decision.until > self.played.now

    @invariant()
    def ready_is_exactly_when_nothing_is_missing(self) -> None:
        world, now = self.world, self.played.now
        whole = (
            world.volume_held
            and world.cluster_prepared
            and world.postgres is Server.UP
            and world.database_checked
            and world.api is Server.UP
            and world.proved
        )
        told = state_of(world, now).phase is Phase.READY
        blocked = world.fault is not None and world.fault.reason is not None
        assert told == (whole and not world.stopping and not blocked and world.maintenance is None)
        if told and world.fault is None:
            assert look(world, now) == Decision(Step.WAIT)

    def teardown(self) -> None:
        """From wherever this came to, a fair environment leads to ready."""
        if self.world.stopping:
            return
        self.world.maintenance = None
        taken = self.played.fair_until_ready(20)
        assert state_of(self.world, self.played.now) == State(Phase.READY), taken


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis_settings(max_examples=150, stateful_step_count=40)


def test_the_first_start_takes_every_step_once_and_in_order() -> None:
    assert Played().fair_until_ready(20) == [
        Step.TAKE_VOLUME,
        Step.PREPARE_CLUSTER,
        Step.START_POSTGRES,
        Step.CHECK_DATABASE,
        Step.START_API,
        Step.PROVE,
    ]


def test_a_restarted_postgres_is_prepared_and_checked_again_while_the_api_runs_on() -> None:
    played = Played()
    played.fair_until_ready(20)
    postgres_died(played.world, played.now)
    assert played.fair_until_ready(20) == [
        Step.PREPARE_CLUSTER,
        Step.START_POSTGRES,
        Step.CHECK_DATABASE,
        Step.PROVE,
    ]


def test_a_hung_api_is_replaced_after_its_time_and_not_before() -> None:
    world = complete(api=Server.UNRESPONSIVE, api_unresponsive_since=100.0, proved=False)
    assert look(world, 100.0 + HUNG_AFTER - 0.1) == Decision(Step.WAIT, 100.0 + HUNG_AFTER)
    assert look(world, 100.0 + HUNG_AFTER) == Decision(Step.REPLACE_API)


@pytest.mark.parametrize(
    ("die", "step"), [(postgres_died, Step.PREPARE_CLUSTER), (api_died, Step.START_API)], ids=["postgres", "api"]
)
def test_more_than_five_ends_in_five_minutes_are_a_crash_loop_tried_every_minute(
    die: Callable[[World, float], None], step: Step
) -> None:
    world = complete()
    for second in range(CRASH_CEILING):
        die(world, float(second))
    assert state_of(world, 10.0).phase is Phase.DEGRADED
    die(world, 10.0)
    state = state_of(world, 10.0)
    assert (state.phase, state.subject) == (Phase.BLOCKED, Reason.CRASH_LOOP)
    assert "more than 5 times in 5 minutes (6 in all)" in str(state.detail)
    assert look(world, 10.0) == Decision(Step.WAIT, 10.0 + CRASH_LOOP_RETRY)
    assert look(world, 69.9) == Decision(Step.WAIT, 10.0 + CRASH_LOOP_RETRY)
    assert look(world, 70.0) == Decision(step)


@pytest.mark.parametrize("die", [postgres_died, api_died], ids=["postgres", "api"])
def test_a_crash_loop_is_told_for_as_long_as_it_lasts(die: Callable[[World, float], None]) -> None:
    """HINDSIGHT_SIDECAR_BLOCKED_EXIT_AFTER counts from the moment on which it is blocked without a break."""
    played = Played()
    played.fair_until_ready(20)
    component = "postgres" if die is postgres_died else "api"
    died: list[float] = []
    while played.now < 1000.0 + 3600:
        die(played.world, played.now)
        died.append(played.now)
        while getattr(played.world, component) is Server.DOWN:
            if len(died) > CRASH_CEILING:
                assert state_of(played.world, played.now).subject == Reason.CRASH_LOOP
            decision = look(played.world, played.now)
            if decision.until is not None:
                played.now = decision.until
            elif decision.step is Step.WAIT:
                played.see_postgres(Server.UP)
            else:
                played.succeed(decision.step)
        if len(died) > CRASH_CEILING:
            assert state_of(played.world, played.now).subject == Reason.CRASH_LOOP
        played.now += 1.5  # it dies a little after its start
    pauses = [after - before for before, after in zip(died[CRASH_CEILING:], died[CRASH_CEILING + 1 :], strict=False)]
    assert set(pauses) == {CRASH_LOOP_RETRY + 1.5}


def test_a_crash_loop_is_over_when_the_component_is_up_and_forgotten_when_it_stayed_up() -> None:
    world = complete()
    for _ in range(CRASH_CEILING + 1):
        api_died(world, 0.0)
    world.api = Server.UP
    assert state_of(world, 61.0).phase is Phase.DEGRADED
    world.proved = True
    assert state_of(world, 61.0).phase is Phase.READY
    api_died(world, CRASH_WINDOW + 100.0)
    assert state_of(world, CRASH_WINDOW + 100.0).phase is Phase.DEGRADED


@pytest.mark.parametrize(
    ("world", "told"),
    [
        (World(), "starting(volume)"),
        (World(volume_held=True), "starting(cluster)"),
        (World(volume_held=True, cluster_prepared=True), "starting(postgres)"),
        (complete(postgres=Server.STARTING, ever_ready=False), "starting(postgres)"),
        (complete(postgres=Server.RECOVERING, ever_ready=False), "starting(recovery)"),
        (complete(database_checked=False, ever_ready=False), "starting(postgres)"),
        (complete(api=Server.STARTING, ever_ready=False), "starting(hindsight-api)"),
        (complete(proved=False, ever_ready=False), "starting(hindsight-api)"),
        (complete(), "ready"),
        (complete(postgres=Server.UNRESPONSIVE), "degraded(postgres)"),
        (complete(postgres=Server.RECOVERING), "degraded(recovery)"),
        (complete(volume_fault="it hangs", postgres=Server.UNRESPONSIVE), "degraded(volume)"),
        (complete(locked="by 1"), "degraded(postgres)"),
        (complete(locked="by 1", api=Server.STARTING, ever_ready=False), "starting(hindsight-api)"),
        (complete(api=Server.DOWN), "degraded(hindsight-api)"),
        (complete(proved=False), "degraded(hindsight-api)"),
        (complete(maintenance="dump"), "maintenance(dump)"),
        (complete(fault=Fault(Reason.NO_SPACE, "full", 0.0)), "blocked(no-space)"),
        (complete(stopping=True, fault=Fault(Reason.NO_SPACE, "full", 0.0)), "stopping"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # the same in every process
)
def test_states_are_told_by_name(world: World, told: str) -> None:
    assert str(state_of(world, 1.0)) == told


def test_a_fault_without_a_reason_is_the_detail_of_the_state_and_no_block() -> None:
    world = World(volume_held=True, fault=Fault(None, "could not prepare the cluster", 2.0))
    assert state_of(world, 1.0) == State(Phase.STARTING, "cluster", "could not prepare the cluster")


def test_after_an_end_the_postgres_that_comes_next_is_told_as_postgres_and_not_as_a_new_cluster() -> None:
    world = complete()
    postgres_died(world, 1.0)
    assert str(state_of(world, 1.0)) == "degraded(postgres)"


def test_a_want_of_space_is_told_while_everything_runs() -> None:
    world = World(
        volume_held=True, cluster_prepared=True, postgres=Server.UP, database_checked=True, api=Server.UP, proved=True
    )
    assert state_of(world, 0.0) == State(Phase.READY)
    world.no_space = "Postgres found no space"
    assert state_of(world, 0.0) == State(Phase.BLOCKED, Reason.NO_SPACE, "Postgres found no space")
    assert look(world, 0.0) == Decision(Step.WAIT)
    world.no_space = None
    assert state_of(world, 0.0) == State(Phase.READY)


def test_for_an_exchange_of_data_directories_both_go_down_and_stay_down() -> None:
    world = complete(fault=Fault(Reason.FOREIGN_CLUSTER, "made by others", 9.0))
    world.postgres_wanted = world.api_wanted = False
    assert look(world, 0.0).step is Step.STOP_API
    world.api_ended()
    assert look(world, 0.0).step is Step.STOP_POSTGRES
    world.postgres_ended()
    assert look(world, 0.0) == Decision(Step.WAIT)
    world.postgres_wanted = True
    world.fault = None
    assert look(world, 0.0).step is Step.PREPARE_CLUSTER


def test_a_state_says_how_far_it_is_and_what_for() -> None:
    assert state_of(complete(postgres=Server.RECOVERING, recovery="21 %"), 0.0).detail == "21 %"
    assert state_of(complete(recovery="21 %"), 0.0).detail is None
    assert state_of(complete(locked="by 1"), 0.0).detail == "by 1"
    assert state_of(complete(volume_fault="it hangs"), 0.0).detail == "it hangs"


def test_nothing_is_begun_on_a_volume_that_hangs() -> None:
    for world in (World(), complete(postgres=Server.DOWN), complete(api=Server.DOWN), complete(proved=False)):
        world.see_volume("it hangs")
        assert look(world, 0.0).step is Step.WAIT
        world.see_volume(None)
        assert look(world, 0.0).step is not Step.WAIT
    world = complete()
    world.see_volume("it hangs")
    world.see_api(Server.UNRESPONSIVE, 10.0)
    world.see_api(Server.UNRESPONSIVE, 1000.0)
    assert look(world, 1000.0).step is Step.WAIT, "it waits for the volume, as all do"
    world.see_volume(None)
    assert look(world, 1000.0).step is Step.WAIT, "it has its time from now on"
    world.see_api(Server.UP, 1001.0)
    assert look(world, 1001.0).step is Step.PROVE
    world.stopping = True
    world.see_volume("it hangs")
    assert look(world, 0.0).step is Step.STOP


def test_hindsight_api_is_not_started_where_postgres_finds_no_space() -> None:
    world = complete(api=Server.DOWN, no_space="0 MiB free")
    assert look(world, 0.0).step is Step.WAIT
    world.no_space = None
    assert look(world, 0.0).step is Step.START_API


def test_steps_that_fail_in_a_row_are_counted_from_the_first() -> None:
    world = complete()
    for now in (10.0, 11.0, 15.0):
        world.step_failed(f"at {now}", now, now + 0.5)
    assert world.fault == Fault(None, "at 15.0", 15.5, tries=3, since=10.0)
    world.fault = Fault(Reason.NO_SPACE, "full", 20.0)
    world.step_failed("another", 30.0, 30.5)
    assert world.fault == Fault(None, "another", 30.5, tries=1, since=30.0)
    world.database_exchanged()
    world.step_failed("of another database", 40.0, 40.5)
    assert world.fault == Fault(None, "of another database", 40.5, tries=1, since=40.0)
