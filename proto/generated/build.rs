//! Compiles the protos of the folder above. protox stands in for protoc, so that cargo and gcc are all it takes.

use std::path::PathBuf;

use prost::Message as _;

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
    let folder = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?);
    std::fs::write(folder.join("descriptors.bin"), descriptors.encode_to_vec())?;
    generate(descriptors)?;
    Ok(())
}

/// `Bytes` fields and this codec are what `tonic_rdma::gather` needs; without it they change nothing. README has this line, and
/// `tests/readme` compares the two.
#[rustfmt::skip]
fn generate(descriptors: tonic_prost_build::FileDescriptorSet) -> std::io::Result<()> {
    tonic_prost_build::configure().bytes(".").codec_path("tonic_rdma::gather::GatherCodec").compile_fds(descriptors)?;
    Ok(())
}
