"""Datasets and folders of batch files on Ray Data (https://docs.ray.io), which schedules, retries and moves the data.

`decoder` has the actors, each of them an engine, and `decode` for any dataset; `folder` serves files of lines shard by
shard, with a journal for each; `cluster` finds Ray, a cluster and room on it, and gives an actor its cores.
"""

from et_jax.batch.ray.decoder import Decoder, decode

__all__ = ["Decoder", "decode"]
