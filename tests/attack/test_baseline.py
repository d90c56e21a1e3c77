"""What each flavour of server does while it is not attacked: the yardstick of the attacks."""

from pathlib import Path

import pytest

from tests.attack.target import FLAVOURS, attacked


@pytest.mark.long
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_server_answers_alike_beside_other_requests(flavour: str, checkpoint: Path, tmp_path: Path) -> None:
    with attacked(flavour, checkpoint, tmp_path) as target:
        alone = target.probe()
        assert len(alone) == 12
        with target.felt() as felt:
            assert [target.probe() for _ in range(20)] == [alone] * 20
            status, _ = target.complete(prompt="text", max_tokens=4)
            assert status == 200
        assert felt.failures == []
        assert len(felt.gaps_s) > 20
        assert target.ask("GET", "/v1/models", headers={})[0] == 401
        assert target.rss_bytes() > 0
