//! Writes the Rust code of this repository's protos: `cargo run -p tonic-rdma-generate`.
//!
//! The code is kept in the repository, so that a build of the library compiles no code generator. A test
//! below generates the code anew, and fails if the code in the repository is stale. protox replaces protoc,
//! so the generator needs only cargo and gcc.
#![forbid(unsafe_code)]

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

use prost::Message as _;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Protos whose code goes into one folder. The paths of folders begin at the root of the repository, and the
/// paths of protos at `include`.
struct Target {
    protos: &'static [&'static str],
    /// The folders in which imports are found.
    include: &'static [&'static str],
    folder: &'static str,
    codec: Codec,
    /// True if the folder also gets `descriptors.bin`, for gRPC's reflection service.
    descriptors: bool,
}

/// The codec that the generated code names.
#[derive(Clone, Copy, Debug)]
enum Codec {
    /// tonic's codec.
    Tonic,
    /// The codec of `tonic_rdma::gather`. It encodes as tonic's codec does where `gather` is not used.
    Gather,
    /// The same, for messages with secrets, which no log shows.
    GatherSecrets,
    /// The same as `Gather`, for messages that have handles and other imported types in their fields.
    Handles,
}

/// Messages with secrets. Their `Debug` is written by hand.
const SECRETS: [&str; 3] =
    [".tonic_rdma.buffer.v1.RemoteBuffer", ".tonic_rdma.buffer.v1.BufferKey", ".tonic_rdma.buffer.v1.Reader"];

/// Packages that others import, and the modules of their types.
const IMPORTED: [(&str, &str); 2] =
    [("tonic_rdma.buffer.v1", "::tonic_rdma_tensor::buffer"), ("tonic_rdma.tensors.v1", "crate::tensors")];

const TARGETS: &[Target] = &[
    Target {
        protos: &["tensor_device.proto"],
        include: &["proto"],
        folder: "tensor/src/control/proto",
        codec: Codec::Tonic,
        descriptors: false,
    },
    Target {
        protos: &["tonic_rdma/buffer.proto"],
        include: &["tensor/proto"],
        folder: "tensor/src/buffer/proto",
        codec: Codec::GatherSecrets,
        descriptors: false,
    },
    Target {
        protos: &["bootstrap.proto"],
        include: &["proto"],
        folder: "tensor/src/bootstrap/proto",
        codec: Codec::Tonic,
        descriptors: false,
    },
    Target {
        protos: &["group.proto"],
        include: &["collective/proto"],
        folder: "collective/src/group/proto",
        codec: Codec::Tonic,
        descriptors: false,
    },
    Target {
        protos: &["control.proto"],
        include: &["graph/proto"],
        folder: "graph/src/bin/tonic-rdma-graph/control/proto",
        codec: Codec::Tonic,
        descriptors: false,
    },
    Target {
        protos: &["parts.proto"],
        include: &["graph/proto"],
        folder: "graph/src/transfer/proto",
        codec: Codec::Tonic,
        descriptors: false,
    },
    Target {
        protos: &["greeter.proto", "placement.proto", "tensors.proto", "transfer.proto"],
        include: &["proto"],
        folder: "proto/generated/src",
        codec: Codec::Gather,
        descriptors: true,
    },
    Target {
        protos: &["image.proto", "kv.proto", "reference.proto"],
        include: &["proto", "tensor/proto"],
        folder: "proto/generated/src",
        codec: Codec::Handles,
        descriptors: false,
    },
    Target {
        protos: &["grpc/testing/test.proto", "checked.proto"],
        include: &["interop/proto"],
        folder: "interop/src/proto",
        codec: Codec::Tonic,
        descriptors: true,
    },
];

fn main() -> Result<()> {
    for target in TARGETS {
        target.generate(&repository().join(target.folder))?;
    }
    Ok(())
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

impl Target {
    /// Writes the code into `folder`.
    fn generate(&self, folder: &Path) -> Result<()> {
        let include = self.include.iter().map(|folder| repository().join(folder));
        let descriptors = protox::compile(self.protos, include)?;
        fs::create_dir_all(folder)?;
        if self.descriptors {
            fs::write(folder.join("descriptors.bin"), descriptors.encode_to_vec())?;
        }
        match self.codec {
            Codec::Tonic => {
                tonic_prost_build::configure().bytes(".").out_dir(folder).compile_fds(descriptors)?;
            }
            // The build script of the book and of the documentation of `gather`. Tests compare this line with
            // both. With stubs, each example has only the methods that it shows.
            #[rustfmt::skip]
            Codec::Gather => {
                tonic_prost_build::configure().bytes(".").codec_path("tonic_rdma::gather::GatherCodec").out_dir(folder).generate_default_stubs(true).compile_fds(descriptors)?;
            }
            Codec::GatherSecrets => {
                let code =
                    tonic_prost_build::configure().bytes(".").codec_path("tonic_rdma::gather::GatherCodec");
                code.skip_debug(SECRETS).out_dir(folder).compile_fds(descriptors)?;
            }
            Codec::Handles => {
                let code =
                    tonic_prost_build::configure().bytes(".").codec_path("tonic_rdma::gather::GatherCodec");
                let import = |code: tonic_prost_build::Builder, (package, module): (&str, &str)| {
                    code.extern_path(format!(".{package}"), module)
                };
                // The services of imported packages would be made too.
                let all = tempfile::tempdir()?;
                IMPORTED.into_iter().fold(code, import).out_dir(&all).compile_fds(descriptors)?;
                let is_own =
                    |name: &str| !IMPORTED.iter().any(|(package, _)| name == format!("{package}.rs"));
                for made in fs::read_dir(&all)? {
                    let made = made?;
                    if made.file_name().to_str().is_some_and(is_own) {
                        fs::copy(made.path(), folder.join(made.file_name()))?;
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{TARGETS, repository};
    use std::fs;

    #[test]
    fn the_code_in_the_repository_is_not_stale() {
        for target in TARGETS {
            let fresh = tempfile::tempdir().expect("a folder");
            target.generate(fresh.path()).expect("protos that compile");
            let mut files = 0;
            for entry in fs::read_dir(fresh.path()).expect("a folder") {
                let made = entry.expect("an entry").path();
                let kept = repository().join(target.folder).join(made.file_name().expect("a name"));
                let same = fs::read(&made).expect("a file") == fs::read(&kept).unwrap_or_default();
                assert!(same, "{} is stale: cargo run -p tonic-rdma-generate", kept.display());
                files += 1;
            }
            assert!(files > 0, "{} has generated files", target.folder);
        }
    }
}
