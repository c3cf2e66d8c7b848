"""`python -m et_jax.report`: pages of what runs left."""

import json

from samples import row, sample, traced, write

from et_jax.report.__main__ import main


def test_a_trace_or_the_output_of_a_batch_makes_its_page(tmp_path, capfd):
    page = tmp_path / "run.html"
    assert main([str(traced(tmp_path / "trace.jsonl")), "-o", str(page)]) == 0
    told = json.loads(page.read_text().split('id="report">')[1].split("</script>")[0])["tokens"]["text-1"]
    done = sample(20)
    assert told["columns"]["entropy (nats)"] == [float(f"{one.entropy:.4g}") for one in done.trace]
    assert not any(word.startswith("#") for word in told["words"])  # spelled by the bundled tokenizer
    assert main([str(traced(tmp_path / "trace.jsonl", model="owner/model")), "-o", str(page)]) == 0
    assert "alternatives are shown by their ids" in capfd.readouterr().err  # of a model that is not here
    assert f"#{done.trace[0].top[0][0]}" in page.read_text()
    batch = write(tmp_path / "out.jsonl", [row(i, [sample(4 + i, seed=i)]) for i in range(5)])
    assert main([str(batch), "-o", str(page)]) == 0
    assert "5, 0 with an error" in page.read_text()
