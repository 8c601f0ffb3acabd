//! Input that can't be used: one error that names it, and status 2.

use crate::{file, onnx, run, stderr};

/// Checks that the command refuses these arguments, and names each of `parts` in one line.
fn refused(arguments: &[&str], parts: &[&str]) {
    let output = run(arguments);
    let text = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
    assert!(text.starts_with("tonic-rdma-graph: "), "{arguments:?}: {text}");
    assert_eq!(text.trim_end().lines().count(), 1, "{arguments:?}: {text}");
    for part in parts {
        assert!(text.contains(part), "{arguments:?} should name {part:?}: {text}");
    }
    assert!(output.stdout.is_empty(), "{arguments:?}");
}

#[test]
fn options_that_make_no_sense_are_named() {
    refused(&[], &["MODEL.onnx"]);
    refused(&["model.onnx", "--unknown"], &["--unknown"]);
    refused(&["model.onnx", "--modes", "rdma-cp"], &["--modes", "did you mean --mode?"]);
    refused(&["model.onnx", "--parts", "0"], &["--parts", "from 1 to 64"]);
    refused(&["model.onnx", "--mode", "tcp"], &["--mode", "tcp", "grpc-tcp"]);
    refused(&["model.onnx", "--receive", "never"], &["--receive", "never", "blocking"]);
    refused(&["model.onnx", "--memory", "much"], &["--memory", "much"]);
    refused(&["model.onnx", "--threads", "0"], &["--threads", "from 1 to 64"]);
    refused(&["model.onnx", "--hosts", "one:1,two:2", "--parts", "3"], &["--hosts", "3 parts"]);
    refused(&["model.onnx", "--hosts", "one"], &["--hosts", "HOST:PORT"]);
    refused(&["model.onnx", "--json", "no/such/folder/rows.json"], &["--json", "no/such/folder/rows.json"]);
}

#[test]
fn files_that_are_no_models_are_named() {
    refused(&["no-such-model.onnx"], &["no-such-model.onnx", "prepare-models"]);
    for content in [&b""[..], b"this is no protobuf", &[0xff; 100]] {
        let (_folder, path) = file(content);
        refused(&[path.to_str().unwrap()], &["model.onnx", "no ONNX", "exported as ONNX"]);
    }
    let (_folder, path) = file(&onnx::operator("Frobnicate"));
    refused(&[path.to_str().unwrap()], &["Frobnicate", "only"]);
}

#[test]
fn models_that_cannot_be_split_as_asked_are_named() {
    let (folder, path) = file(&onnx::convolutions());
    let model = path.to_str().unwrap();
    refused(&[model, "--parts", "64"], &["--parts", "64 parts"]);
    refused(&[model, "--memory", "1KiB"], &["--memory: 1024 bytes are too little", "are the least: part"]);
    let several = ["--threads", "2", "--receive", "blocking"];
    refused(&[&[model], &several[..]].concat(), &["--threads 2", "blocking"]);
    refused(&[model, "--cut", "no_such_node"], &["--cut", "no_such_node", "--nodes"]);
    refused(&[model, "--parts", "4", "--cut", "conv1"], &["--parts 4", "--cut"]);
    refused(&[model, "--symbol", "picture:0=N"], &["picture", "image"]);
    refused(&[model, "--symbol", "image"], &["--symbol", "image"]);
    let list = folder.path().join("parts");
    std::fs::write(&list, "conv1.matmatmul=1\nconv3.pad=0\n").unwrap();
    // Later nodes of the model can't be in earlier parts.
    refused(&[model, "--assign", list.to_str().unwrap()], &["--assign", "part 1", "part 0"]);
    refused(&[model, "--assign", "no-such-list"], &["--assign", "no-such-list"]);
}
