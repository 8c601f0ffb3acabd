# Dockerfile.command: the image of the command `tonic-rdma`, for bridges, and for `probe` and `devices` in a debug container.
#   docker build -f docs/deploy/Dockerfile.command -t registry.example/tonic-rdma:0.1.0 .
# With network cards: --build-arg FEATURES=ibverbs
FROM rust:1.88-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends \
    cmake make python3 pkg-config libclang-dev libnl-3-dev libnl-route-3-dev libibverbs-dev librdmacm-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
ARG FEATURES=""
RUN cargo build --release --locked -p tonic-rdma-cli --features "$FEATURES" && cp target/release/tonic-rdma /usr/local/bin/

FROM debian:bookworm-slim
RUN apt-get update && apt-get install -y --no-install-recommends libibverbs1 librdmacm1 ibverbs-providers && rm -rf /var/lib/apt/lists/*
COPY --from=build /usr/local/bin/tonic-rdma /usr/local/bin/tonic-rdma
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/tonic-rdma"]
