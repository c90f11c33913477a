# Two images. `docker build -t refitd .` makes the one for daemons, with torch for CPUs; another build of torch comes from another
# index (--build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130). `docker build --target control -t refitd-control .` makes
# the one for coordinators and refitctl, without torch.
FROM python:3.11-slim AS control

WORKDIR /src/refitd
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY refitd refitd
COPY cli cli
COPY docs docs
COPY configs configs
RUN pip install --no-cache-dir -c constraints.txt .

COPY configs/node.toml configs/coordinator.toml /etc/refitd/
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin refitd \
    && install -d -m 0700 -o refitd -g refitd /run/refitd /var/lib/refitd

WORKDIR /
USER refitd
ENV REFITD_RUNTIME_DIR=/run/refitd
# Keeps the journal over restarts.
VOLUME ["/var/lib/refitd"]
CMD ["refitd", "coordinator", "--config", "/etc/refitd/coordinator.toml"]

FROM control AS node

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
USER root
RUN pip install --no-cache-dir -c /src/refitd/constraints.txt torch ${TORCH_INDEX:+--index-url "$TORCH_INDEX"}
USER refitd
# Mount /run/refitd into the containers of trainers and engines.
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s CMD ["refitctl", "status", "--json"]
CMD ["refitd", "serve", "--standalone", "--config", "/etc/refitd/node.toml"]
