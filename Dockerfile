# xgpt in a container: plans and serves as a user without rights.
#
#   docker build -t xgpt --build-arg TORCH_INDEX_URL=... .
#
# TORCH_INDEX_URL: the package index of PyTorch's CPU wheels, or of those of a CUDA version, as pytorch.org names them.
# Without it torch comes from pip's own index, whose Linux wheels carry CUDA: they run on both, and are large.
#
#   docker run -v $PWD:/work -v $PWD/keys:/run/secrets/keys:ro -p 127.0.0.1:8000:8000 xgpt \
#     serve plan.json --host 0.0.0.0 --api-key-file /run/secrets/keys
ARG PYTHON=3.11
FROM python:${PYTHON}-slim

ARG TORCH_INDEX_URL=
# EXTRA=ray: with Ray, for plans of xgpt's own engine on several machines.
ARG EXTRA=serve

# A compiler: the CPU attention kernels are compiled at the first use, and torch may want one, too.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 xgpt

WORKDIR /opt/xgpt
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY configs configs
COPY xgpt xgpt
COPY xprofiler xprofiler
COPY xsimulator xsimulator
COPY xscheduler xscheduler
COPY xrunner xrunner
RUN torch=$(sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt) \
    && pip install --no-cache-dir ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==${torch}" \
    && grep -v '^torch==' constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir -c /tmp/constraints.txt ".[${EXTRA}]"

USER xgpt
ENV PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/home/xgpt/.cache
WORKDIR /work
EXPOSE 8000
STOPSIGNAL SIGTERM
# The port that `serve` was given, if it was another: -e XGPT_PORT=...; with --ssl-certfile also -e XGPT_SCHEME=https
ENV XGPT_PORT=8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-m", "xgpt.health"]
ENTRYPOINT ["xgpt"]
CMD ["--help"]
