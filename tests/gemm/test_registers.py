"""The registers that the warpgroups trade."""

import pytest


@pytest.mark.compile
def test_the_warpgroups_share_what_the_launch_gives() -> None:
    """65536 registers, in steps of 8 a thread: 168 each for 384 threads; more would hang at setmaxnreg."""
    from epicute.gemm.kernel import CONSUMER_REGISTERS, PRODUCER_REGISTERS, THREADS

    launch = 65536 // THREADS // 8 * 8
    assert launch == 168
    assert PRODUCER_REGISTERS + 2 * CONSUMER_REGISTERS <= 3 * launch
    assert PRODUCER_REGISTERS % 8 == CONSUMER_REGISTERS % 8 == 0
    assert 24 <= PRODUCER_REGISTERS
    assert CONSUMER_REGISTERS <= 256
