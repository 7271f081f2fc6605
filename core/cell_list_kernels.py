"""Warp kernels over a `nvdd.cell_list.CellList`: the points near other points, and sums over edges at their two ends."""
# No `from __future__ import annotations` here: Warp reads the annotations of kernels as objects.

from functools import cache
from typing import Any

from nvdd.warp_runtime import warp


@cache
def near_kernel() -> Any:
    """How many points are near a receiver in one column of boxes, or the edges from them; a thread for each column.

    A vector is ``(x_sender - x_receiver) + (image_sender - image_receiver) @ cell``, so that an edge and its reverse are
    negatives of each other to the last bit, on whatever ranks, and both are within the cutoff or none is.
    """
    wp = warp()
    module = wp.get_module(f"{__name__}.near")

    @wp.func
    def distance(low: wp.float64, high: wp.float64) -> wp.float64:
        """From the origin to an interval."""
        return wp.max(wp.max(low, -high), wp.float64(0.0))

    @wp.kernel(enable_backward=False, module=module)
    def near(
        fill: int,
        begin: wp.int64,
        cutoff: wp.float64,
        loose: wp.float64,
        most: wp.int64,
        apart: int,
        where: wp.array(dtype=wp.vec3d),
        x: wp.array(dtype=wp.vec3d),
        image: wp.array(dtype=wp.vec3d),
        system: wp.array(dtype=wp.int64),
        cells: wp.array(dtype=wp.mat33d),
        low: wp.array(dtype=wp.vec3d),
        width: wp.vec3d,
        boxes: wp.vec3i,
        columns: wp.vec2i,
        reach: wp.vec2i,
        first: wp.array(dtype=wp.int64),
        of_box: wp.array(dtype=wp.int64),
        box_where: wp.array(dtype=wp.vec3d),
        box_x: wp.array(dtype=wp.vec3d),
        box_image: wp.array(dtype=wp.vec3d),
        box_row: wp.array(dtype=wp.int64),
        place: wp.array2d(dtype=wp.int64),
        counts: wp.array2d(dtype=wp.int32),
        vectors: wp.array(dtype=wp.vec3d),
        receivers: wp.array(dtype=wp.int64),
        senders: wp.array(dtype=wp.int64),
        shifts: wp.array(dtype=wp.vec3d),
    ):
        k, column = wp.tid()
        i = begin + wp.int64(k)
        at = where[i]
        s = system[i]
        corner = low[s]
        bx = wp.clamp(int(wp.floor((at[0] - corner[0]) / width[0])) - reach[0], 0, boxes[0] - columns[0])
        by = wp.clamp(int(wp.floor((at[1] - corner[1]) / width[1])) - reach[1], 0, boxes[1] - columns[1])
        bx += column // columns[1]
        by += column % columns[1]
        lx = corner[0] + wp.float64(bx) * width[0] - at[0]
        ly = corner[1] + wp.float64(by) * width[1] - at[1]
        dx = distance(lx, lx + width[0])
        dy = distance(ly, ly + width[1])
        left = loose * loose - dx * dx - dy * dy
        found = wp.int64(0)
        if left >= wp.float64(0.0):
            half = wp.sqrt(left)
            top = boxes[2] - 1
            z0 = wp.clamp(int(wp.floor((at[2] - half - corner[2]) / width[2])), 0, top)
            z1 = wp.clamp(int(wp.floor((at[2] + half - corner[2]) / width[2])), 0, top)
            base = ((s * wp.int64(boxes[0]) + wp.int64(bx)) * wp.int64(boxes[1]) + wp.int64(by)) * wp.int64(boxes[2])
            xi = x[i]
            mi = image[i]
            cell = wp.transpose(cells[s])
            out = wp.int64(0)
            if fill == 1:
                out = place[k, column]
            for p in range(int(first[base + wp.int64(z0)]), int(first[base + wp.int64(z1) + wp.int64(1)])):
                away = box_where[p] - at
                if wp.dot(away, away) < loose * loose and (apart == 1 or of_box[p] != i):
                    shift = box_image[p] - mi
                    d = (box_x[p] - xi) + cell * shift
                    if wp.dot(d, d) < cutoff * cutoff:
                        if fill == 1:
                            vectors[out + found] = d
                            receivers[out + found] = i
                            senders[out + found] = box_row[p]
                            if shifts.shape[0] > 0:
                                shifts[out + found] = shift
                        found += wp.int64(1)
                        if found >= most:
                            break
        if fill == 0:
            counts[k, column] = int(found)

    return near


@cache
def fold_kernel() -> Any:
    """Gradients by edge vectors as gradients by the places of both atoms, and by a strain at each; a thread for each
    receiver, whose edges are next to each other."""
    wp = warp()
    module = wp.get_module(f"{__name__}.fold")

    @wp.kernel(enable_backward=False, module=module)
    def fold(
        begin: wp.int64,
        first: wp.array(dtype=wp.int64),
        vectors: wp.array(dtype=wp.vec3d),
        senders: wp.array(dtype=wp.int64),
        gradient: wp.array(dtype=wp.vec3d),
        by_place: wp.array(dtype=wp.vec3d),
        by_strain: wp.array(dtype=wp.mat33d),
    ):
        k = wp.tid()
        zero = wp.float64(0.0)
        force = wp.vec3d(zero, zero, zero)
        virial = wp.outer(force, force)
        for e in range(int(first[k]), int(first[k + 1])):
            g = gradient[e]
            w = wp.float64(0.5) * wp.outer(vectors[e], g)
            force += g
            virial += w
            wp.atomic_add(by_place, senders[e], g)
            wp.atomic_add(by_strain, senders[e], w)
        i = begin + wp.int64(k)
        wp.atomic_sub(by_place, i, force)
        wp.atomic_add(by_strain, i, virial)

    return fold
