"""`horovod.torch.elastic.sampler`: `ElasticSampler`, from `hvdlite.elastic`."""

from hvdlite.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
