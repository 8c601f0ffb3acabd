//! Compiles the protos of this folder. protox stands in for protoc, so that cargo and gcc are all it takes.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = ["greeter.proto", "transfer.proto"];
    for file in files {
        println!("cargo::rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
