"""A model that `load` splits over several devices: the texts of one device, its memory, its replicas, refusals."""

import jax
import pytest
from capabilities import SMALL, TINY, WIDE, WIDE_SMALL, adapter, folder, tiny

from et_jax.errors import UsageError
from et_jax.serve.requests import GenerationRequest, SamplingParams

over_devices = pytest.mark.devices
PROMPTS = ["It was", "In the year 1801 the old king", "The sea"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


def texts(model):
    return [one.token_ids for one in model.generate(PROMPTS, GREEDY)]


@over_devices
def test_texts_are_those_of_one_device_over_any_number(hardly_optimised):
    alone = texts(tiny(WIDE, dtype="float32"))
    for size in (2, 4, 8):
        model = tiny(WIDE, dtype="float32", tensor_parallel=size)
        assert texts(model) == alone
        assert model.config.num_kv_heads == max(2, size)
        assert len(jax.tree.leaves(model.params)[0].addressable_shards) == size
        model.close()


@over_devices
def test_a_model_that_drafts_and_adapters_are_split_too(hardly_optimised):
    requests = [GenerationRequest(prompt=one, params=GREEDY, adapter=name) for one in PROMPTS for name in (None, "a")]
    written = []
    for size in (1, 4):
        drafting = {"draft": str(folder(WIDE_SMALL)), "draft_tokens": 3, "draft_length": "fixed"}
        model = tiny(WIDE, dtype="float32", tensor_parallel=size, adapters={"a": adapter(2, WIDE)}, **drafting)
        rows = model.generate(requests)
        written.append([(one.token_ids, [step.accepted for step in one.trace]) for one in rows])
        assert {len(x.devices()) for x in jax.tree.leaves(model.weights)} == {size}
        model.close()
    assert written[0] == written[1]
    assert written[0][0][0] != written[0][1][0] and any(sum(accepted) for _, accepted in written[0])


@over_devices
def test_replicas_take_the_next_devices(hardly_optimised):
    model = tiny(WIDE, dtype="float32", tensor_parallel=4, replicas=3)
    texts(model)
    [served] = model._decoders.serving.values()
    groups = [sorted(device.id for device in each.device.state.urgency.devices()) for each in served.replicas]
    assert groups == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    model.update(model.params)  # stays where it is, on every group
    assert [len(jax.tree.leaves(each.device.weights)[0].devices()) for each in served.replicas] == [4, 4, 4]


@over_devices
def test_each_device_holds_its_part():
    alone, two = (tiny(TINY, dtype="float32", tensor_parallel=size)._plan for size in (1, 2))
    assert alone is not None and two is not None
    assert alone.page / 2 <= two.page < alone.page / 1.99 and alone.weights / 2 < two.weights < alone.weights / 1.9


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        (64, r"tensor_parallel is 64, above the number of devices, \d; choose at most that \(XLA_FLAGS="),
        (0, "tensor_parallel is 0; it must be"),
    ],
)
def test_what_cannot_be_split_is_refused(size, sentence):
    with pytest.raises(UsageError, match=sentence):
        tiny(TINY, tensor_parallel=size)


@over_devices
def test_a_number_that_does_not_divide_the_model_is_refused():
    with pytest.raises(UsageError, match=r"tensor_parallel is 3; .* can be split over 1, 2, 4 devices"):
        tiny(TINY, tensor_parallel=3)
    with pytest.raises(UsageError, match=r"tensor_parallel is 8; .* can be split over 1, 2, 4 devices"):
        tiny(WIDE, tensor_parallel=8, draft=str(folder(SMALL)))
