"""How the type of each node is found: by key where one decides, else on torch's fake tensors."""
