"""Do one step: transport, executor and the library's face. torch.distributed."""
