# rapidformer with everything it needs, for CPUs or NVIDIA GPUs:
#
#   docker build -t rapidformer .                                    # CPU
#   docker build -t rapidformer --build-arg DEVICE=cuda .            # CUDA 12.8
#   docker build -t rapidformer --build-arg EXTRAS=all,deepspeed .   # with DeepSpeed
#   docker run --rm --gpus all --ipc=host -v "$PWD:/workspace" rapidformer --help
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG DEVICE=cpu
# Where torch's wheels for the device are: a CUDA version may be chosen here.
ARG CUDA=cu128
ARG EXTRAS=all
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git openssh-client \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/rapidformer
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
# In one step: the version of torch follows from pyproject.toml, and the wheel for the device
# (2.13.0+cpu) counts as newer than PyPI's.
RUN if [ "$DEVICE" = cuda ]; then wheels="$CUDA"; else wheels=cpu; fi \
    && pip install --no-cache-dir ".[$EXTRAS]" \
        --extra-index-url "https://download.pytorch.org/whl/$wheels"

WORKDIR /workspace
ENTRYPOINT ["rapidformer"]
CMD ["--help"]
