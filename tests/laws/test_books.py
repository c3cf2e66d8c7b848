"""What is told of a run adds up: tokens, blocks, costs, drafts, what either model said."""

import math


def test_figures_add_up(served):
    capability, model = served.capability, served.anew()
    done = model.generate(served.requests)
    rows = [row for one in done for row in one.trace]
    assert model.metrics.generated_tokens == sum(len(one.token_ids) for one in done)
    assert sum(model.metrics.finished.values()) == len(done)
    for one in done:
        assert one.token_ids == tuple(row.token for row in one.trace)
        assert one.cost > 0 and math.isclose(one.efficiency, one.entropic_time / one.cost)
    by_large = [row for row in rows if not row.by_small]
    assert all(0 < row.blocks_read <= row.blocks_held for row in by_large)
    read, held = (sum(getattr(row, name) for row in by_large) for name in ("blocks_read", "blocks_held"))
    window = model.config.windows[0] is not None
    assert (read < held) == (capability.prunes or window)
    assert (sum(row.accepted for row in rows) > 0) == capability.drafts
    left = [row.constrained_entropy for row in done[-1].trace]  # under a grammar, which forces some tokens
    assert 0.0 in left and max(left) > 0.0 and all(row.constrained_entropy is None for row in done[0].trace)
    if capability.drafts:
        assert any(row.accepted and row.constrained_entropy == 0.0 for row in done[-1].trace)
        assert sum(row.accepted for row in rows) <= sum(row.drafted for row in rows)
        assert model.metrics.accepted_tokens == sum(row.accepted for row in rows)
        limits = [asked.params.max_tokens for asked in served.requests for _ in range(asked.params.n)]
        for one, limit in zip(done, limits, strict=True):
            assert all(at + 1 + row.drafted <= limit for at, row in enumerate(one.trace))
    if capability.certifies is not None:
        assert all(row.kept_mass >= 1 - capability.certifies for row in rows)
