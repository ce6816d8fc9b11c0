"""What the gated delta rules share (``docs/maths.md`` §6, §7): gates, and a window run in either of two orders.

A scalar gate per head (Gated DeltaNet) and a gate per key channel (Kimi Delta Attention) take the same code: the last
axis of a decay has size 1 or K.
"""
