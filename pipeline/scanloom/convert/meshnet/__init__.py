"""MeshNets of brainchop: TensorFlow.js layer models, folders with safetensors, bundles."""
