"""How many clusters of CTAs a GPU runs at once, where each CTA has an SM for itself.

A cluster stays within a GPC, and which SMs of a GPC work differs from chip to chip of one product: only the driver
knows. A persistent kernel with one cluster more than fit takes twice its time.
"""

from __future__ import annotations

import functools
import logging

from epicute.decode.schedule import clusters_of

__all__ = ["resident_clusters"]

log = logging.getLogger("epicute.decode")

PTX = b""".version 7.8
.target sm_90
.address_size 64
.visible .entry whole_sm() { ret; }
\0"""

SHARED_BYTES = 200 << 10
"""More than half of an SM's."""

THREADS = 384


@functools.cache
def resident_clusters(index: int, cluster: int) -> int:
    """Clusters of ``cluster`` CTAs that ``cuda:index`` runs at once, one CTA an SM; what is sure where the driver does
    not say. The device must have a context.
    """
    import torch

    multiprocessors = int(torch.cuda.get_device_properties(index).multi_processor_count)
    sure = clusters_of(multiprocessors, cluster)
    if cluster == 1:
        return sure
    try:
        with torch.cuda.device(index):
            return _asked(cluster) or sure
    except Exception as error:
        log.warning("cuda:%d: clusters of %d: %s; assuming %d", index, cluster, error, sure)
        return sure


def _asked(cluster: int) -> int:
    import cuda.bindings.driver as cuda

    def done(result: tuple[object, ...]) -> object:
        if result[0] != cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(str(result[0]))
        return result[1] if len(result) > 1 else None

    module = done(cuda.cuModuleLoadData(PTX))
    try:
        function = done(cuda.cuModuleGetFunction(module, b"whole_sm"))
        limit = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        done(cuda.cuFuncSetAttribute(function, limit, SHARED_BYTES))
        attribute = cuda.CUlaunchAttribute()
        attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        shape = attribute.value.clusterDim
        shape.x, shape.y, shape.z = cluster, 1, 1
        attribute.value.clusterDim = shape
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
        config.sharedMemBytes = SHARED_BYTES
        config.attrs = [attribute]
        config.numAttrs = 1
        found = done(cuda.cuOccupancyMaxActiveClusters(function, config))
        assert isinstance(found, int)
        return found
    finally:
        cuda.cuModuleUnload(module)
