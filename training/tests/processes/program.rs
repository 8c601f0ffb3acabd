//! Made-up samples, and the program.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output};

use flate2::Compression;
use flate2::write::GzEncoder;

/// Writes samples whose class shows in their pixels.
pub(crate) fn write_samples(folder: &Path) {
    for (name, number) in [("train", 96_u32), ("t10k", 20)] {
        let classes: Vec<u8> = (0..number).map(|sample| (sample % 10) as u8).collect();
        let picture = |class: &u8| {
            (0..28 * 28_u32).map(|pixel| if pixel % 10 == u32::from(*class) { 255 } else { 9 }).collect()
        };
        let pixels: Vec<u8> = classes.iter().flat_map(|class| -> Vec<u8> { picture(class) }).collect();
        write(&folder.join(format!("{name}-images-idx3-ubyte.gz")), &[number, 28, 28], &pixels);
        write(&folder.join(format!("{name}-labels-idx1-ubyte.gz")), &[number], &classes);
    }
}

fn write(path: &Path, dimensions: &[u32], elements: &[u8]) {
    let mut file = GzEncoder::new(std::fs::File::create(path).unwrap(), Compression::fast());
    file.write_all(&[0, 0, 8, dimensions.len() as u8]).unwrap();
    for dimension in dimensions {
        file.write_all(&dimension.to_be_bytes()).unwrap();
    }
    file.write_all(elements).unwrap();
    file.finish().unwrap();
}

/// Runs the program without the variables of a launcher that may have started this test.
pub(crate) fn program(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap()
}

/// Makes the command without the variables of a launcher.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tonic-rdma-training"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if ["RANK", "WORLD_SIZE", "OMPI_", "PMIX_", "SLURM_", "RDMA_"]
            .iter()
            .any(|start| text.starts_with(start))
        {
            command.env_remove(&name);
        }
    }
    // Many processes on a busy machine need longer to connect than peers have by default.
    command.env("RDMA_HANDSHAKE_TIMEOUT", "120s").args(arguments);
    command
}

/// Returns the output of a program as text.
pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
