"""Private names of other libraries, used here and nowhere else.

One file per library and part of it. A function is named for what it does and imports what it needs
when called, unless importing the file already implies torch. ``PRIVATE_NAMES`` lists what a file
relies on and what for: when a new version moves a name, a test says which. ``OVERRIDDEN`` lists the
private methods that classes of ours replace, wherever they are.
"""

_MODEL = "transformers.PreTrainedModel"
_STAGE = "torch.distributed.pipelining.PipelineStage"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"
_BEFORE_2_12, _BEFORE_2_15 = "before torch 2.12: ", "before torch 2.15: "
"""How a reason begins if that version has no such method."""

OVERRIDDEN = {
    f"{_STAGE}._get_init_p2p_neighbors_ops": f"{_BEFORE_2_15}a rank with two neighbouring stages: "
    "gloo cannot connect it to itself, and torch 2.11 tries to",
    f"{_STAGE}._validate_fwd_input": f"{_BEFORE_2_12}micro-batches of different shapes",
    f"{_STAGE}._validate_fwd_outputs": f"{_BEFORE_2_12}micro-batches of different shapes",
    f"{_AGENT}._rendezvous": "counting restarts the same way on all nodes",
    f"{_AGENT}._start_workers": "watching the workers of a round",
    f"{_AGENT}._set_local_rank_env": "several agents on one node",
    f"{_AGENT}._monitor_workers": "reading why a worker has failed",
    f"{_AGENT}._exit_barrier": "leaving when all nodes are done",
    f"{_AGENT}._shutdown": "stopping every process that a worker has started",
    f"{_MODEL}._init_weights": "how transformers asks for a model's initial weights",
    f"{_MODEL}._no_split_modules": "how transformers asks what must stay on one device",
    f"{_MODEL}._supports_sdpa": "how transformers asks which attention a model can use",
    f"{_MODEL}._tied_weights_keys": "how transformers asks which weights are tied",
    "transformers.models.falcon.modeling_falcon.FalconAttention._split_heads": "keys and values by "
    "slices, for which the host does not wait",
    "argparse.HelpFormatter._format_args": "the help of values that we ask for ourselves",
    "logging.Logger._log": "loggers that take main_process_only",
}
