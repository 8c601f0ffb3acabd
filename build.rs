//! Compiles the proto of the tensor device. protox stands in for protoc, so that cargo and gcc are all it takes.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto/tensor_device.proto");
    let descriptors = protox::compile(["tensor_device.proto"], ["proto"])?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
