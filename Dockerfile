# The image of tarjob's pods: tarshards from this checkout, with its kernels compiled.
#
#     docker build -t REGISTRY/tarshards .
#     docker build -t REGISTRY/train --build-arg EXTRAS=torch,gcs .
#
# To add the program that your jobs run, begin another Dockerfile with FROM REGISTRY/tarshards.

FROM python:3.11-slim-bookworm AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY setup.py setup.cfg pyproject.toml README.md LICENSE /checkout/
COPY tarshards /checkout/tarshards
ARG EXTRAS=s3,gcs,http
RUN python -m venv /opt/tarshards \
    && /opt/tarshards/bin/pip install --no-cache-dir "/checkout[$EXTRAS]" \
    && /opt/tarshards/bin/python -c "from tarshards.kernels import _headers, _jpeg, _mapped, _pixels, _rows, _sidecars, _tar, _wire"

FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/tarshards /opt/tarshards
RUN useradd --uid 1000 --create-home user
ENV PATH=/opt/tarshards/bin:$PATH
USER 1000:1000
WORKDIR /home/user
# A Job's command replaces this; tarjob's worker passes signals on and reaps orphans itself.
ENTRYPOINT ["tini", "--"]
CMD ["tarshards"]
