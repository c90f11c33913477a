FROM python:3.11-slim

WORKDIR /src/refitd
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY refitd refitd
COPY cli cli
RUN pip install --no-cache-dir -c constraints.txt .

COPY configs/node.toml /etc/refitd/node.toml
RUN useradd --system --uid 10001 --no-create-home --shell /usr/sbin/nologin refitd \
    && install -d -m 0700 -o refitd -g refitd /run/refitd /var/lib/refitd

WORKDIR /
USER refitd
ENV REFITD_RUNTIME_DIR=/run/refitd
# Keeps the journal over restarts; mount /run/refitd into the containers of trainers and engines.
VOLUME ["/var/lib/refitd"]
HEALTHCHECK --interval=10s --timeout=5s --start-period=5s CMD ["refitctl", "status", "--json"]
CMD ["refitd", "serve", "--standalone", "--config", "/etc/refitd/node.toml"]
