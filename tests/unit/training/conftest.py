"""Two small corpora and two small settings: novels alone, and novels with tasks."""

import io
import tarfile

import numpy as np
import pytest
from small_runs import MIXED_VOCAB, MIXED_WINDOW, SCHEDULE, VOCAB, WINDOW, model
from tokenizers import Tokenizer

from et_jax.models.bundled import bundled_folder
from et_jax.training import corpus
from et_jax.training.mixture import Mixture
from et_jax.training.schedule import Curriculum
from et_jax.training.settings import Settings

WORDS = "the ship sailed over grey water and a captain spoke of her long voyage home to England"


@pytest.fixture(scope="module", autouse=True)
def _steps_are_hardly_optimised(hardly_optimised):
    """A test takes a handful of steps with each program."""


def works(folder, texts):
    """Write a corpus of works."""
    with tarfile.open(folder / "works.tar.xz", "w:xz") as tar:
        for index, text in enumerate(texts):
            member = tarfile.TarInfo(f"works/work_{index:02}.txt")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    return folder / "works.tar.xz"


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """A corpus of twelve works of words drawn by frequency."""
    random = np.random.default_rng(0)
    words = np.array([*WORDS.split()[:9], "spoke.\n", "“No,”", "she"])
    texts = [" ".join(words[random.zipf(1.5, 400 + 20 * index) % len(words)]) for index in range(12)]
    return works(tmp_path_factory.mktemp("corpus"), texts)


@pytest.fixture(scope="session")
def data(archive, tmp_path_factory):
    return corpus.prepare(archive, tmp_path_factory.mktemp("data"), VOCAB)


@pytest.fixture(scope="session")
def settings():
    return Settings(
        model=model(VOCAB, WINDOW),
        schedule=SCHEDULE,
        window=WINDOW,
        report_every=1,
        evaluate_every=4,
        save_every=3,
        evaluated_tokens=64,
    )


@pytest.fixture(scope="session")
def mixed_data(tmp_path_factory):
    """The bundled tokenizer, and a corpus of sentences of words drawn by frequency."""
    random = np.random.default_rng(0)
    by_rank = np.array(WORDS.split())

    def sentence():
        return " ".join(by_rank[random.zipf(1.4, 9) % len(by_rank)]).capitalize() + "."

    folder = tmp_path_factory.mktemp("corpus")
    archive = works(folder, [" ".join(sentence() for _ in range(160)) for _ in range(8)])
    tokenizer = Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
    return corpus.prepare(archive, folder / "data", MIXED_VOCAB, tokenizer)


@pytest.fixture(scope="session")
def mixed_settings():
    return Settings(
        model=model(MIXED_VOCAB, MIXED_WINDOW),
        schedule=Curriculum(warmup=2, decay_steps=4, stages=((0, 128), (5, 256))),
        mixture=Mixture(),
        window=MIXED_WINDOW,
        report_every=1,
        evaluate_every=8,
        save_every=3,
        evaluated_tokens=512,
        probed_rows=2,
        probed_pairs=2,
    )
