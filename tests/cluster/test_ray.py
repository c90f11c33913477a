"""refitd under a real Ray of three raylets, where Ray is installed: scripts/try-ray installs it and does the same."""

import pytest

pytest.importorskip("ray")


@pytest.mark.own_daemon
@pytest.mark.timeout(600)
def test_daemons_end_with_their_job_and_come_back_with_their_actors():
    from tests.schedulers.ray import tried

    assert [row for row in tried().rows if not row[2]] == []
