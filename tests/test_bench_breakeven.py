"""Break-even benchmark: regression lines, thresholds, block sizes and requests to the engine."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from harness.fake_prefill_engine import FakePrefillEngine

from bench.breakeven import (
    BreakEvenError,
    Geometry,
    PeerUnreachable,
    PrefillEngine,
    Proposal,
    RegressionLine,
    Samples,
    fit,
    geometry_of_engines,
    lengths_up_to,
    propose,
    worst_miss,
)
from kvtier.client import Group, GroupKind
from kvtier.protos.v1 import admin_pb2, common_pb2

LENGTHS = (128, 256, 512, 1024, 2048, 4096)


def on(line: RegressionLine, lengths: Iterable[int] = LENGTHS, rounds: int = 5) -> Samples:
    """Returns timings that lie on a line."""
    return {tokens: [line.at(tokens)] * rounds for tokens in lengths}


class TestProposal:
    @pytest.mark.parametrize(
        ("transfer", "compute", "threshold"),
        [
            (
                RegressionLine(2**-9, 2**-20),
                RegressionLine(0, 2**-15),
                80,
            ),  # 2^-9 / (2^-15 - 2^-20) = 66.06: 67 tokens, 80 are whole blocks
            (
                RegressionLine(2**-9, 2**-20),
                RegressionLine(2**-4, 2**-15),
                80,
            ),  # what a request costs in either case does not count
            (
                RegressionLine(2**-9, 0),
                RegressionLine(0, 2**-15),
                80,
            ),  # at 64 tokens both take 2^-9: 65 is the first that is worth it
            (RegressionLine(2**-9, 0), RegressionLine(0, 2**-11), 16),  # 5 tokens
            (RegressionLine(2**-20, 2**-20), RegressionLine(0, 2**-10), 0),  # from the first token
            # noise can make the offset negative
            (RegressionLine(-(2**-20), 2**-20), RegressionLine(0, 2**-10), 0),
            (RegressionLine(2**-9, 2**-15), RegressionLine(0, 2**-15), None),
            (
                RegressionLine(2**-9, 2**-14),
                RegressionLine(2**-2, 2**-15),
                None,
            ),  # slower at any length, however slow requests are
        ],
    )
    def test_known_lines(self, transfer: RegressionLine, compute: RegressionLine, threshold: int | None) -> None:
        """The least that is worth it, in whole blocks; timings without any noise leave no doubt."""
        expected = Proposal(threshold, threshold, threshold)
        assert propose(on(transfer), on(compute), 16) == expected
        assert propose(on(transfer), compute.per_token, 16) == expected

    def test_whole_blocks(self) -> None:
        """The threshold is rounded up to whole blocks of the engine."""
        transfer, compute = on(RegressionLine(2**-9, 0)), 2**-15
        assert [propose(transfer, compute, block).threshold for block in (1, 16, 100, 528)] == [65, 80, 100, 528]

    def test_noise(self) -> None:
        """The interval covers the true value, widens with variance and is reproducible."""
        draws = random.Random(7)

        def noisy(line: RegressionLine, part: float) -> Samples:
            return {tokens: [line.at(tokens) * (1 + draws.uniform(0, part)) for _ in range(9)] for tokens in LENGTHS}

        def width(part: float) -> int:
            transfer, compute = noisy(RegressionLine(0.002, 1e-6), part), noisy(RegressionLine(0.05, 1e-5), part)
            proposal = propose(transfer, compute, 1)
            assert proposal == propose(transfer, compute, 1)
            assert proposal.low is not None
            assert proposal.high is not None
            assert proposal.threshold is not None
            assert proposal.low <= proposal.threshold <= proposal.high
            assert proposal.low * 0.9 <= 223 <= proposal.high * 1.1
            return proposal.high - proposal.low

        assert 0 < width(0.02) < width(0.4)

    def test_doubt_reaches_never(self) -> None:
        """If two rates are indistinguishable, the interval has no upper bound."""
        draws = random.Random(3)
        near = {tokens: [(0.002 + tokens * 1e-5) * draws.uniform(0.8, 1.2) for _ in range(5)] for tokens in LENGTHS}
        proposal = propose(near, 1.02e-5, 16)
        assert proposal.low is not None
        assert proposal.high is None

    def test_one_slow_round_does_not_count(self) -> None:
        """One outlier of a second per length does not move the line."""
        line = RegressionLine(0.001, 1e-6)
        disturbed = {tokens: [*seconds, 1.0] for tokens, seconds in on(line).items()}
        found = fit(disturbed)
        assert found.fixed == pytest.approx(line.fixed)
        assert found.per_token == pytest.approx(line.per_token)
        assert worst_miss(found, disturbed) == pytest.approx(0, abs=1e-9)

    def test_the_short_ones_say_what_is_fixed(self) -> None:
        """An error of a tenth at the longest moves what is fixed by less than a tenth."""
        line = RegressionLine(0.001, 1e-5)
        samples = on(line) | {4096: [line.at(4096) * 1.1] * 5}
        assert fit(samples).fixed == pytest.approx(line.fixed, rel=0.1)
        assert 0.02 < worst_miss(fit(samples), samples) < 0.1

    def test_one_length_is_no_line(self) -> None:
        """It is refused."""
        with pytest.raises(ValueError, match="two lengths"):
            fit(on(RegressionLine(1, 1), [16]))


class TestGeometry:
    def test_given(self) -> None:
        """One group of whole blocks."""
        geometry = Geometry.given(1024, 16)
        assert geometry.groups == (Group(16 << 10, 16),)
        assert (geometry.bytes_per_token, geometry.step_tokens) == (1024, 16)

    def test_several_groups(self) -> None:
        """Blocks of all groups end together. One state block is transferred for every length."""
        groups = (Group(1600, 16), Group(4800, 48, kind=GroupKind.SLIDING_WINDOW), Group(999, 48, kind=GroupKind.STATE))
        geometry = Geometry(groups)
        assert (geometry.step_tokens, geometry.step_bytes, geometry.bytes_per_token) == (48, 9600, 200)
        assert (geometry.step_blocks(), geometry.states()) == ([(0, 3), (1, 1)], [2])

    def test_learned_from_engines(self) -> None:
        """Engines with equal sizes are one geometry.

        Of several one must be named. Our own runs are no engines.
        """

        def session(model: str, part: int, client: str = "vllm") -> admin_pb2.SessionStatus:
            groups = [common_pb2.Group(block_tokens=16, part_bytes=part, kind=common_pb2.GROUP_KIND_FULL_ATTENTION)]
            return admin_pb2.SessionStatus(client_name=client, model=model, groups=groups, world_size=2)

        def learned(*sessions: admin_pb2.SessionStatus, model: str | None = None) -> Geometry:
            return geometry_of_engines(admin_pb2.GetStatusResponse(sessions=sessions), model)

        a, b, own = session("a", 1600), session("b", 3200), session("bench", 1, "kvtier bench")
        found = learned(a, own, a)
        assert (found.model, found.bytes_per_token, found.world_size) == ("a", 100, 2)
        assert learned(a, b, model="b").bytes_per_token == 200
        for sessions, model, why in [
            ([own], None, "no engine is connected"),
            ([a], "b", "no engine of b is connected"),
            ([a, b], None, r"several sizes are connected \(a, b\): name one with --model"),
            ([admin_pb2.SessionStatus(model="many groups")], None, "no engine is connected"),
        ]:
            with pytest.raises(BreakEvenError, match=why):
                learned(*sessions, model=model)

    def test_lengths(self) -> None:
        """Whole blocks, each about half of the next, and the longest is as long as may be."""
        assert lengths_up_to(4096, 16) == [128, 256, 512, 1024, 2048, 4096]
        assert lengths_up_to(100, 16) == [16, 48, 96]
        assert lengths_up_to(15, 16) == []


class TestPrefillEngine:
    def test_what_a_token_costs_is_found(self) -> None:
        """The fitted line equals the rates of an engine with a simulated clock."""
        with FakePrefillEngine(seconds_per_request=0.25, seconds_per_token=2**-10) as stand_in:
            engine = PrefillEngine(stand_in.url, clock=stand_in.clock)
            assert engine.find_model() == 512
            line = fit({tokens: [engine.prefill(tokens)] for tokens in (16, 64, 256)})
        assert line.fixed == pytest.approx(0.25)
        assert line.per_token == pytest.approx(2**-10)

    def test_prompts_are_new(self) -> None:
        """No two begin alike, so that no block of one is found for another.

        And one token is all that is asked for.
        """
        with FakePrefillEngine() as stand_in:
            engine = PrefillEngine(f"{stand_in.url}/v1/")
            engine.find_model()
            for tokens in (16, 16, 64, 64):
                engine.prefill(tokens)
        assert [len(prompt) for prompt in stand_in.prompts] == [16, 16, 64, 64]
        assert len({tuple(prompt[:16]) for prompt in stand_in.prompts}) == 4
        assert all(token in range(10, 256) for prompt in stand_in.prompts for token in prompt)
        assert stand_in.questions == 4 * [
            {"model": "stand-in", "max_tokens": 1, "temperature": 0, "path": "/v1/completions"}
        ]

    @pytest.mark.parametrize(
        ("said", "why"),
        [
            ({"usage": {"prompt_tokens": 9}}, "was given 16 tokens and computed 9"),
            ({"usage": {"prompt_tokens_details": {"cached_tokens": 8}}}, "had 8 of 16 tokens cached"),
            ({"refuse": 404}, '/v1/completions answers 404: {"error": "no such model"}'),
        ],
    )
    def test_what_is_no_measure(self, said: dict[str, object], why: str) -> None:
        """A prompt that was cut, cached or refused was not computed."""
        with FakePrefillEngine(**said) as stand_in:  # type: ignore[arg-type]
            engine = PrefillEngine(stand_in.url)
            engine.find_model()
            with pytest.raises(BreakEvenError, match=why):
                engine.prefill(16)

    def test_usage_may_be_missing_or_more(self) -> None:
        """Engines may put a token of their own in front, and need not count."""
        for usage in ({}, {"prompt_tokens": 17, "prompt_tokens_details": None}):
            with FakePrefillEngine(usage=usage, max_model_len=None) as stand_in:
                engine = PrefillEngine(stand_in.url, clock=stand_in.clock)
                assert engine.find_model() is None
                assert engine.prefill(16) == 0

    def test_no_engine(self) -> None:
        """The error says whether the engine is unreachable, not HTTP, or not an engine."""
        with FakePrefillEngine() as gone:
            pass
        with pytest.raises(
            PeerUnreachable, match=r"^no engine answers at http://127\.0\.0\.1:\d+: Connection refused$"
        ):
            PrefillEngine(gone.url).find_model()
        with FakePrefillEngine() as stand_in, pytest.raises(BreakEvenError, match="does not say which model"):
            PrefillEngine(f"{stand_in.url}/elsewhere").find_model()
        for url in ("127.0.0.1:8000", "file:///etc/passwd", "http://"):
            with pytest.raises(ValueError, match="is no URL of an engine"):
                PrefillEngine(url)
