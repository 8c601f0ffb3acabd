//! Compiles the protos of the folder above. protox stands in for protoc, so that cargo and gcc are all it takes.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = [
        "greeter.proto",
        "parameters.proto",
        "placement.proto",
        "tensor_device.proto",
        "tensors.proto",
        "transfer.proto",
    ];
    for file in files {
        println!("cargo::rerun-if-changed=../{file}");
    }
    let descriptors = protox::compile(files, [".."])?;
    // `Bytes` fields and this codec are what `tonic_rdma::gather` needs; without it they change nothing.
    let configuration =
        tonic_prost_build::configure().bytes(".").codec_path("tonic_rdma::gather::GatherCodec");
    configuration.compile_fds(descriptors)?;
    Ok(())
}
