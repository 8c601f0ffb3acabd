//! Tables and their text form.

use proptest::prelude::*;

use crate::plan::{Algorithm, Collective, PlanTable};

#[test]
fn tables_are_parsed() {
    let table: PlanTable = " one-shot:..16KiB , Halving-Doubling:.. 1 MiB,ring/64KiB:..".parse().unwrap();
    for (bytes, choice) in [
        (0, (Algorithm::OneShot, 256 << 10)),
        ((16 << 10) - 1, (Algorithm::OneShot, 256 << 10)),
        (16 << 10, (Algorithm::HalvingDoubling, 256 << 10)),
        (1 << 20, (Algorithm::Ring, 64 << 10)),
        (usize::MAX, (Algorithm::Ring, 64 << 10)),
    ] {
        assert_eq!(table.choose(bytes), choice, "{bytes}");
    }
    assert_eq!(table.pinned(), "one-shot:..16KiB,halving-doubling:..1MiB,ring/64KiB:..");
    assert_eq!(
        table.to_string(),
        "below 16 KiB: one-shot, because it is pinned\n\
         16 KiB to 1 MiB: halving-doubling in chunks of 256 KiB, because it is pinned\n\
         from 1 MiB on: ring in chunks of 64 KiB, because it is pinned"
    );
}

#[test]
fn one_algorithm_may_stand_alone() {
    for (text, pinned) in [("ring", "ring:.."), ("ring/4KiB", "ring/4KiB:.."), ("one-shot:..", "one-shot:..")]
    {
        assert_eq!(text.parse::<PlanTable>().unwrap().pinned(), pinned);
    }
}

#[test]
fn errors_name_the_part_at_fault() {
    for (text, error) in [
        ("", "the text has no part; the form is ALGORITHM[/CHUNK]:..END,ALGORITHM[/CHUNK]:.."),
        (
            "one-shot,ring:..",
            r#"the part "one-shot" is not of the form ALGORITHM[/CHUNK]:..[END], such as ring/256KiB:..1MiB"#,
        ),
        (
            "one-shot:16KiB,ring:..",
            r#"the part "one-shot:16KiB" is not of the form ALGORITHM[/CHUNK]:..[END], such as ring/256KiB:..1MiB"#,
        ),
        (
            "one-shot:..16KiB,",
            r#"the part "" is not of the form ALGORITHM[/CHUNK]:..[END], such as ring/256KiB:..1MiB"#,
        ),
        (
            "star",
            r#"in the part "star": there is no algorithm "star"; there are one-shot, halving-doubling, ring, hierarchical and naive"#,
        ),
        (
            "ring/0:..",
            r#"in the part "ring/0:..": "0" is no size above 0; write a number of bytes, such as 64, 16KiB or 1MiB"#,
        ),
        (
            "one-shot:..16x,ring:..",
            r#"in the part "one-shot:..16x": "16x" is no size above 0; write a number of bytes, such as 64, 16KiB or 1MiB"#,
        ),
        (
            "one-shot:..99999999999GiB,ring:..",
            r#"in the part "one-shot:..99999999999GiB": "99999999999GiB" is no size above 0; write a number of bytes, such as 64, 16KiB or 1MiB"#,
        ),
        (
            "one-shot:..2MiB,ring:..2MiB,ring:..",
            r#"the part "ring:..2MiB" must end above the part before it, which ends at 2MiB"#,
        ),
        (
            "one-shot:..,ring:..",
            r#"the part "one-shot:.." has no end, so there are no sizes for the parts after it"#,
        ),
        (
            "one-shot:..1KiB,ring:..2KiB",
            r#"the last part, "ring:..2KiB", has an end; larger sizes need a plan too, so leave out the end"#,
        ),
    ] {
        assert_eq!(text.parse::<PlanTable>().unwrap_err().to_string(), error);
    }
    let error = "ring:..,".repeat(65).parse::<PlanTable>().unwrap_err();
    assert_eq!(error.reason(), "the text has 66 parts, and a table has at most 64");
}

#[test]
fn small_broadcasts_to_many_ranks_go_along_a_tree() {
    let table: PlanTable = "one-shot:..1KiB,ring/2KiB:..".parse().unwrap();
    let broadcast = Collective::Broadcast { root: 0 };
    assert_eq!(table.choose_for(broadcast, 3, 8).0, Algorithm::OneShot);
    assert_eq!(table.choose_for(broadcast, 16, 8).0, Algorithm::HalvingDoubling);
    assert_eq!(table.choose_for(broadcast, 16, 4096), (Algorithm::Ring, 2048));
    assert_eq!(table.choose_for(Collective::AllGather, 16, 8).0, Algorithm::OneShot);
}

fn any_text() -> impl Strategy<Value = String> {
    let part = (0..Algorithm::ALL.len(), 1..1_usize << 40, 1..1_usize << 30);
    prop::collection::vec(part, 1..20).prop_map(|mut parts| {
        parts.sort_by_key(|(_, end, _)| *end);
        parts.dedup_by_key(|(_, end, _)| *end);
        let count = parts.len();
        let texts = parts.into_iter().enumerate().map(|(index, (algorithm, end, chunk))| {
            let end = if index + 1 == count { String::new() } else { end.to_string() };
            format!("{}/{chunk}:..{end}", Algorithm::ALL[algorithm])
        });
        texts.collect::<Vec<_>>().join(",")
    })
}

proptest! {
    #[test]
    fn a_table_that_is_written_is_read_back(text in any_text()) {
        let table: PlanTable = text.parse().unwrap();
        prop_assert_eq!(table.pinned().parse::<PlanTable>().unwrap(), table);
    }

    #[test]
    fn no_text_makes_the_parser_panic(text in "([a-z-]{0,9}/?[0-9KMGiB]{0,6}:?[.]{0,3}[0-9KMGiB]{0,25},?){0,4}|\\PC*") {
        let _ = text.parse::<PlanTable>();
    }
}
