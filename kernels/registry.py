"""Names of the kernels in a compiled program's text; `cost_model` finds them by these."""

WITH_RERUN = "_with_rerun"  # ends the name of a kernel that repeats a step's work where its faster form has failed
SKIPPED_TURNS = "skipped_turns"  # metadata key: turns of a kernel's longest loop that a sparse call skips
ATTENTION = "attention"
ATTENTION_WITH_RERUN = ATTENTION + WITH_RERUN
ATTENTION_INT8 = "attention_int8"
ATTENTION_INT8_WITH_RERUN = ATTENTION_INT8 + WITH_RERUN
ATTENTION_BY_SCORES = {"exact": ATTENTION, "int8": ATTENTION_INT8}  # by the format of the scores
TURN = "turn"
PROLOGUE = "attention_prologue"
JOIN = "attention_join"
RESIDUAL_NORM = "residual_norm"
CONVOLUTION = "convolution"
MODULATION = "modulation"
LINEAR_INT8 = "linear_int8"
LINEARS = (LINEAR_INT8,)  # of quantized linear layers
ROUND_TOKENS = "round_tokens"

# Kernels that can be switched off on a machine: the word that switches one off, and its name.
SWITCHES = {
    "attention": ATTENTION,
    "attention_int8": ATTENTION_INT8,
    "convolution": CONVOLUTION,
    "linear_int8": LINEAR_INT8,
    "modulation": MODULATION,
    "prologue": PROLOGUE,
    "residual_norm": RESIDUAL_NORM,
}
KERNELS = tuple(SWITCHES.values())
# Further kernel names in a program's text, and the kernel that each is part of.
HELPER_KERNELS = {
    ATTENTION_WITH_RERUN: ATTENTION,
    ATTENTION_INT8_WITH_RERUN: ATTENTION_INT8,
    TURN: ATTENTION,
    JOIN: PROLOGUE,
    ROUND_TOKENS: LINEAR_INT8,
}
