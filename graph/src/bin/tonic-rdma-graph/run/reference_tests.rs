#![allow(clippy::unwrap_used, clippy::panic, reason = "tests")]

use clap::Parser as _;

use super::*;
use tonic_rdma_graph::transfer::TransferMode;

use crate::onnx;
use crate::options::Options;

#[test]
fn a_tensor_that_differs_is_named_with_its_first_element_that_differs() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    std::fs::write(&path, onnx::convolutions()).unwrap();
    let options = Options::parse_from(["tonic-rdma-graph", path.to_str().unwrap()]).run;
    let plan = Plan::new(&options, 2).unwrap();
    let reference = Reference::compute(&plan, 1, &[]).unwrap();
    let expected = reference.expected(&plan, 1).unwrap();
    assert_eq!((expected.crossings.len(), expected.results.len()), (1, 1));
    // Other inputs give other tensors, so a micro-batch that comes at the wrong place is noticed.
    let digests = &expected.crossings[0].1;
    assert!(digests.len() == 3 && digests[0] != digests[1] && digests[1] != digests[2], "{digests:?}");

    let outlet = plan.placements.crossings()[0].outlet;
    let value = &reference.sets[1][&outlet];
    let mut content = value.bytes().to_vec();
    content[4 * 77] ^= 1;
    let mut differs = Differs {
        what: Checked::Crossing(0),
        mode: TransferMode::RdmaCp,
        micro_batch: 4,
        set: 1,
        spec: value.spec().unwrap().to_string(),
    };
    let text = reference.describe(&plan, &differs, &content);
    let name = &plan.placements.crossings()[0].name;
    for part in ["rdma-cp, micro-batch 4", name, "element 77", "and should be"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    differs.spec = "float32[2]".to_owned();
    let text = reference.describe(&plan, &differs, &content);
    assert!(text.contains("it is float32[2], and should be"), "{text}");
}
