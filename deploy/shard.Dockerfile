# One shard. The build context is wheels/shard, which deploy/build.sh fills: no network is used.
# It holds the dependencies in deps/ and the project's own wheel in own/, so that a change of code
# leaves the layers with torch alone. A stage for the wheels instead of a bind mount: that builds
# alike with BuildKit and without it.
ARG BASE_IMAGE=python:3.11-slim

FROM ${BASE_IMAGE} AS build
COPY deps /wheels
# pip works on the environment from outside, the image runs without it. The wheels were resolved
# when they were gathered: all of them are installed, and nothing else.
RUN python -m venv --without-pip /opt/meshnet \
    && pip --python /opt/meshnet/bin/python install --quiet --no-cache-dir --no-index --no-deps /wheels/*.whl

FROM ${BASE_IMAGE}
RUN useradd --uid 10001 --key UID_MAX=20000 --no-create-home --home-dir /tmp --shell /bin/false meshnet
COPY --from=build /opt/meshnet /opt/meshnet
COPY own /opt/wheel
RUN pip --python /opt/meshnet/bin/python install --quiet --no-cache-dir --no-index --no-deps /opt/wheel/*.whl
# Whatever is written goes to /tmp, a tmpfs where the root is read-only.
ENV PATH=/opt/meshnet/bin:$PATH \
    HF_HOME=/tmp/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /tmp
EXPOSE 8001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=4s --start-period=120s --retries=3 CMD ["python", "-ISc", \
    "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8001, timeout=3); c.request('GET', '/readyz'); raise SystemExit(c.getresponse().status != 200)"]
CMD ["meshnet", "shard", "--host", "0.0.0.0", "--port", "8001"]
