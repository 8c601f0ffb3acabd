//! The real models, with optimization: `cargo test --release -p tonic-rdma-graph --test command --
//! --ignored light::`

use serde_json::Value;

use crate::{run, stderr};

/// Returns the files that `graph/prepare-models` has installed.
fn models() -> Vec<std::path::PathBuf> {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/prepare-models");
    let output = std::process::Command::new(script).output().unwrap();
    if output.status.code() == Some(77) {
        println!("skipped: the ONNX models are not installed (graph/prepare-models)");
        return Vec::new();
    }
    let folder = String::from_utf8(output.stdout).unwrap();
    let files = std::fs::read_dir(folder.trim()).unwrap().map(|file| file.unwrap().path());
    files.filter(|file| file.extension().is_some_and(|extension| extension == "onnx")).collect()
}

#[test]
#[ignore = "takes too long without optimization"]
fn models_use_what_is_preallocated_and_neither_end_copies_from_the_second_step_on() {
    for model in models() {
        for parts in ["2", "4"] {
            let name = format!("{} in {parts} parts", model.display());
            let modes =
                ["--mode", "rdma-zerocp,rdma-in-place", "--steps", "2", "--rounds", "1", "--json", "-"];
            let output = run(&[&[model.to_str().unwrap(), "--parts", parts], &modes[..]].concat());
            assert_eq!(output.status.code(), Some(0), "{name}: {}", stderr(&output));
            let json: Value = serde_json::from_slice(&output.stdout).unwrap();
            for row in json["modes"].as_array().unwrap() {
                let counts = ["sender_copies", "receiver_copies"].map(|field| row[field].as_u64().unwrap());
                let received = row["received"].as_u64().unwrap();
                assert!(received > 0 && row["errors"] == 0, "{name}: {row}");
                // What is written into a slot is copied out of it.
                let copied = if row["mode"] == "rdma-in-place" { 0 } else { received };
                assert_eq!(counts, [0, copied], "{name}: {row}");
            }
            for part in json["memory"].as_array().unwrap() {
                // What comes beyond depends on how soon receivers read.
                for of in ["slots", "sends"] {
                    let [preallocated, used, refused] =
                        ["preallocated", "used", "refused"].map(|field| part[of][field].as_u64().unwrap());
                    let off = used.abs_diff(preallocated);
                    assert!(off <= preallocated / 20 && refused == 0, "{name}: {of}: {part}");
                }
            }
            println!("{name}: {}", json["memory"]);
        }
    }
}
