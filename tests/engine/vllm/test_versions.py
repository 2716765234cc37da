from __future__ import annotations

import warnings

import pytest

from vime.engine.vllm.versions import adapter_for


def test_releases_that_were_run_have_their_own_adapter() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        old, new = adapter_for("0.26.0"), adapter_for("0.32.1+cu130")
    assert old.server_flags() == () and not old.reports_version_spans and not old.stamps_version
    assert new.server_flags() == ("--enable-scale-out",) and new.reports_version_spans and new.stamps_version


@pytest.mark.parametrize(("version", "nearest"), [("0.28.0", "0.26.0"), ("0.30.2", "0.32.0"), ("0.40.0", "0.32.0")])
def test_another_release_is_treated_like_the_nearest_with_a_warning(version: str, nearest: str) -> None:
    with pytest.warns(UserWarning, match=f"{version} was never run with vime; it is treated like {nearest}"):
        assert adapter_for(version).version == nearest


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(ValueError, match="'dev'"):
        adapter_for("dev")
