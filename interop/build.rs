//! Compiles the protos of `proto`. protox stands in for protoc, so that cargo and gcc are all it takes.

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["grpc/testing/test.proto", "checked.proto"], ["proto"])?;
    // What server reflection tells.
    let folder = std::env::var("OUT_DIR")?;
    std::fs::write(format!("{folder}/descriptors.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
