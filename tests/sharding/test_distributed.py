"""Processes that meet: what they say to each other, and what happens when one does not come."""

import re
import signal
import socket

import pytest

from experiments.launch import free_port
from tests.processes import run
from tlt_jax.sharding import distributed
from tlt_jax.sharding.distributed import DistributedConfig, Tickets


def test_processes_agree_exchange_and_share_a_counter():
    ended = run(
        """
        values = d.exchange("uneven", list(range(1000 * index)))
        assert [len(v) for v in values] == [0, 1000, 2000], values
        big = d.exchange("big", bytes([index]) * (9_000_000 * (index == 1)))
        assert [len(v) for v in big] == [0, 9_000_000, 0] and set(big[1]) == {1}
        tickets, mine = d.Tickets("a", 500), []
        while found := tickets.claim(7):
            mine += found
        assert not tickets.claim(1)
        everyone = d.exchange("tickets", mine)
        assert sorted(sum(everyone, [])) == list(range(500))
        assert d.Tickets("b", 500).claim(1) and len(d.exchange("b", 0)) == 3
        time.sleep(0.5 * (index == 2))
        t = time.monotonic()
        d.barrier("late")
        assert index == 2 or time.monotonic() - t > 0.3
        try:
            d.barrier("late")
        except ValueError as error:
            assert "have met at 'tlt barrier late' before" in str(error)
        else:
            raise AssertionError("a second meeting of one name passed")
        d.agree("same", {"a": (1, 2), "b": {"c": None}})
        print("all well")
        d.agree("config", {"a": 1, "b": {"c": index == 2}})
        """,
        3,
    )
    for process in ended:
        assert "all well" in process.output, process.output
        assert process.status == 1
        assert "config: b.c is False in process 0 and True in process 2" in process.output


@pytest.mark.slow
def test_the_death_of_one_is_noticed_within_20_seconds():
    ended = run(
        """
        d.barrier("begin")
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        d.barrier("nobody comes")
        """,
        3,
    )
    assert ended[1].status == -signal.SIGKILL
    for process in (ended[0], ended[2]):
        assert process.status != 0
        assert process.seconds - ended[1].seconds < 20
        assert re.search("another task died|heartbeat|unhealthy", process.output, re.I)


def test_an_error_of_one_ends_it_at_once():
    """Its message comes first; it does not wait for the others, nor they for ever."""
    ended = run(
        """
        if index == 1:
            raise SystemExit("the model is broken")
        d.barrier("nobody comes")
        """,
        2,
    )
    assert ended[1].status == 1 and ended[1].output.strip().endswith("the model is broken")
    assert ended[0].status != 0 and ended[0].seconds - ended[1].seconds < 20


def test_one_process_meets_itself():
    config = DistributedConfig()
    with distributed.together(config):
        assert (distributed.index(), distributed.count()) == (0, 1)
        assert distributed.exchange("x", {"a": 1}) == [{"a": 1}]
        for _ in range(2):
            distributed.barrier("as often as it likes")
        distributed.agree("config", {"a": 1})
    tickets = Tickets("t", 10)
    assert [list(tickets.claim(4)) for _ in range(4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
        [],
    ]
    with pytest.raises(KeyError), distributed.together(config):
        raise KeyError("as it was")


@pytest.mark.parametrize(
    "settings, words",
    [
        (("localhost",), "'localhost' is neither none, auto nor host:port"),
        (("localhost:0", 2, 0), "neither none"),
        (("localhost:99999", 2, 0), "neither none"),
        (("localhost:1234",), "processes=0, index=-1: with a coordinator say"),
        (("localhost:1234", 2, 2), "processes=2, index=2"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        DistributedConfig(*settings)


def test_an_address_that_nobody_answers_or_another_holds(monkeypatch):
    monkeypatch.setattr(distributed, "RENDEZVOUS_S", 0.5)
    port = free_port()
    with pytest.raises(RuntimeError, match=f"found no coordinator at localhost:{port} within"):
        distributed.join(DistributedConfig(f"localhost:{port}", 2, 1))
    with socket.socket() as other:
        other.bind(("", port))
        other.listen()
        with pytest.raises(RuntimeError, match=f"cannot listen on port {port}"):
            distributed.join(DistributedConfig(f"localhost:{port}", 2, 0))
