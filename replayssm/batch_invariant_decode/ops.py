"""The ops of this folder as ``torch.library`` knows them."""

from __future__ import annotations

from replayssm.batch_invariant_decode.checked import check_values
from replayssm.custom_op import define
from replayssm.dispatch import by_device

_FAMILY = "batch_invariant_decode"


step = define(
    "batch_invariant_decode_step(Tensor(a!) ssm_state, Tensor(b!) x_rows, Tensor(c!)? z_rows, Tensor(d!) dt_rows, "
    "Tensor(e!) B_rows, Tensor(f!)? C_rows, Tensor(g!) num_buffered, Tensor(h!)? ring_start, Tensor(i!) target_rows, "
    "Tensor(j!) chunk_flags, Tensor(k!) out, Tensor(l!)? shadow, Tensor(m!)? arrivals, Tensor(n!)? sums, "
    "Tensor(o!)? num_summed, Tensor x, Tensor? z, Tensor dt, Tensor B, Tensor C, Tensor A, Tensor? D, "
    "Tensor? dt_bias, Tensor batch_indices, int chunk_size, int most_live, bool dt_softplus, float dt_min, "
    "float dt_max) -> ()",
    by_device(_FAMILY, "step", check_values),
)
decode_rows = define(
    "batch_invariant_decode_rows(Tensor(a!) initial_states, Tensor(b!) out, Tensor x, Tensor? z, Tensor dt, Tensor A, "
    "Tensor B, Tensor C, int chunk_size, Tensor chunk_starts, Tensor slots, Tensor target_rows, Tensor chunk_flags, "
    "Tensor? D, Tensor? dt_bias, bool dt_softplus, float dt_min, float dt_max) -> ()",
    by_device(_FAMILY, "decode_rows"),
)
store_tails = define(
    "batch_invariant_decode_store(Tensor(a!) x_rows, Tensor(b!)? z_rows, Tensor(c!) dt_rows, Tensor(d!) B_rows, "
    "Tensor(e!)? C_rows, Tensor(f!) num_buffered, Tensor(g!)? ring_start, Tensor(h!)? num_summed, Tensor x, Tensor? z, "
    "Tensor dt, Tensor B, Tensor? C, Tensor cu_seqlens, Tensor batch_indices, int chunk_size, bool extend) -> ()",
    by_device(_FAMILY, "store_tails"),
)
masked_update_rows = define(
    "masked_update_rows(Tensor(a!) states, Tensor indices, Tensor values) -> ()",
    by_device(_FAMILY, "masked_update_rows"),
)
refresh = define(
    "batch_invariant_decode_refresh(Tensor(a!) shadow, Tensor ssm_state, Tensor batch_indices) -> ()",
    by_device(_FAMILY, "refresh"),
)
commit = define(
    "batch_invariant_decode_commit(Tensor(a!) num_buffered, Tensor batch_indices, Tensor num_accepted, "
    "int max_tokens) -> ()",
    by_device(_FAMILY, "commit"),
)
