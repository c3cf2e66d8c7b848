"""Streams in a real kernel: they are drawn as they come, awaited, and interrupted without harm."""

import asyncio

import nbclient
import nbformat
import pytest

CELLS = {
    "load": "import sys, et_jax\nmodel = et_jax.load('bundled-small', max_num_seqs=2)",
    "generate": "done = model.generate(['It was'] * 3, max_tokens=8, temperature=0.0, progress=True)",
    "show": "shown = et_jax.show(model.stream('It was', max_tokens=8, temperature=0.0))\nshown",
    "completion": "shown[0]",
    "same": "print([one.text for one in shown] == [done[0].text], 'ipywidgets' in sys.modules)",
    "two": "et_jax.show(model.stream('It <was>', max_tokens=4, n=2))",
    "await": "print(''.join([one.text async for one in model.stream_async('It was', max_tokens=8, temperature=0.0)])"
    " == done[0].text)",
    "interrupted": "et_jax.show(model.stream('It was', max_tokens=2000, ignore_eos=True))",
    "after": "print([one.text == done[0].text for one in model.generate(['It was'], max_tokens=8, temperature=0.0)])",
}


async def executed() -> dict[str, list]:
    """The outputs of every cell; the one of that name is interrupted once it shows something."""
    cells = {name: nbformat.v4.new_code_cell(source) for name, source in CELLS.items()}
    book = nbformat.v4.new_notebook(cells=list(cells.values()))
    client = nbclient.NotebookClient(book, timeout=500, kernel_name="python3", allow_errors=True)
    async with client.async_setup_kernel():
        for i, (name, cell) in enumerate(cells.items()):
            running = asyncio.ensure_future(client.async_execute_cell(cell, i))
            if name == "interrupted":
                while not cell.outputs:
                    await asyncio.sleep(0.05)
                assert client.km is not None
                await client.km.interrupt_kernel()  # pyright: ignore[reportGeneralTypeIssues]
            await running
    return {name: cell.outputs for name, cell in cells.items()}


@pytest.fixture(scope="module")
def outputs(hardly_optimised) -> dict[str, list]:
    return asyncio.run(executed())


def test_no_cell_fails_but_the_interrupted_one_which_leaves_the_model_as_it_was(outputs):
    failed = {name: one.ename for name, all_ in outputs.items() for one in all_ if one.output_type == "error"}
    assert failed == {"interrupted": "KeyboardInterrupt"}
    assert not outputs["load"]
    shown = outputs["interrupted"][0].data["text/html"]
    assert 1 <= shown.count("title=") < 2000 and shown.endswith("<p>interrupted</p></div>")
    assert outputs["after"][0].text == "[True]\n"


def test_a_bar_and_a_stream_are_one_output_each_and_continuations_stand_below_one_another(outputs):
    [bar] = outputs["generate"]
    assert bar.output_type == "display_data" and '<progress value="3" max="3">' in bar.data["text/html"]

    [shown], [completion] = outputs["show"], outputs["completion"]
    html = shown.data["text/html"]
    assert html == completion.data["text/html"] and 'class="et-jax"' in html and "8 tokens (length)" in html
    assert outputs["same"][0].text == "True False\n" and outputs["await"][0].text == "True\n"
    [shown] = outputs["two"]
    html = shown.data["text/html"]
    assert 0 < html.index("prompt 1, continuation 1") < html.index("prompt 1, continuation 2")
    assert html.count("It &lt;was&gt;") == 2 and "<was>" not in html
