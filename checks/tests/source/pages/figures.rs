//! Compares the tables of figures on the pages with the files that they are copied from, figures in sentences with the
//! tables, and the texts of pictures with the pictures.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use regex::{Match, Regex};

use tonic_rdma_checks::pages::{self, BOOK, Page};
use tonic_rdma_checks::root;

/// Figures in sentences that no table of the page has: the beginning of the page's name, the figures, and why.
const EXCEPTIONS: &[(&str, &str, &str)] = &[
    ("benchmarks-collectives", "1.05 1.25", "limits of the check of the plans"),
    ("tuning", "12 1.5", "the page names the two commands that print them"),
];

#[test]
fn pages_have_the_tables_of_the_files() {
    let checked = Command::new(root().join("docs/book/copy-tables")).arg("--check").output().unwrap();
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}

#[test]
fn figures_in_sentences_are_in_tables() {
    let pages = figure_pages();
    let faults: Vec<String> = pages.iter().flat_map(|page| faults(page, &pages)).collect();
    assert!(
        faults.is_empty(),
        "no table on the page, on a page that the paragraph links to, or of `benches/figures NAME` in the paragraph \
         has these:\n{}",
        faults.join("\n")
    );
    for (name, figures, _) in EXCEPTIONS {
        let page = pages.iter().find(|page| page.name().starts_with(name)).expect(name);
        let prose = page.prose();
        for figure in figures.split_whitespace() {
            assert!(prose.contains(figure), "{name} no longer has the exception {figure}");
        }
    }
}

#[test]
fn a_figure_that_is_in_no_table_is_found() {
    let table = "<!-- table: figures/none -->\n| a | b |\n|---|---|\n| 2.38 ms | 1.14 |\n<!-- end -->\n";
    let found = |sentence: &str| {
        let page = Page {
            path: format!("{BOOK}/tuning.md").into(),
            text: format!("{table}\n{sentence}\n\n```sh\n9 ms\n```\n"),
        };
        faults(&page, &[]).len()
    };
    for right in ["It takes 2.4 ms.", "12 % less, so 1.1 times as fast", "in 4 ms", "512 × 8 KiB", "`3.3 ×`"]
    {
        assert_eq!(found(right), usize::from(right == "in 4 ms"), "{right}");
    }
    for (wrong, faults) in [
        ("16 MiB takes 2.1 ms, not 2.5 ms", 2),
        ("1.13, 1.2 and 1.3 times", 3),
        ("3.3 × as fast", 1),
        ("30 % less", 1),
    ] {
        assert_eq!(found(wrong), faults, "{wrong}");
    }
}

#[test]
fn texts_of_charts_name_all_of_the_legend_or_nothing_of_it() {
    let mut seen = 0;
    for page in figure_pages() {
        for (alt, file) in pages::targets(&page.text).into_iter().filter(|(_, file)| file.ends_with(".svg")) {
            seen += 1;
            let picture = fs::read_to_string(root().join(page.path.parent().unwrap()).join(&file)).unwrap();
            let faults = unnamed(&alt, &picture);
            assert!(faults.is_empty(), "{}: the text of {file} lacks {faults:?}", page.path.display());
        }
    }
    assert!(seen > 10, "only {seen} pictures were found: is this check broken?");
    let picture = "<text>\ngrpc-tcp\n</text><text>grpc-native</text><text>10 µs</text>";
    assert_eq!(unnamed("Latency of grpc-tcp", picture), ["grpc-native".to_owned()].into());
    assert_eq!(unnamed("grpc-tcp, grpc-native, grpc-rdma", picture), ["grpc-rdma".to_owned()].into());
    assert_eq!(unnamed("grpc-native beside grpc-tcp", picture), BTreeSet::new());
}

/// Returns the modes that either the text or the picture's legend names, if the text names modes.
fn unnamed(alt: &str, picture: &str) -> BTreeSet<String> {
    let mode = Regex::new(r"\b(grpc|rdma)-[\w-]+").unwrap();
    let modes = |text| mode.find_iter(text).map(|mode| mode.as_str().to_owned()).collect::<BTreeSet<_>>();
    let (named, drawn) = (modes(alt), modes(picture));
    if named.is_empty() { named } else { &named ^ &drawn }
}

/// README and the book's pages but those of design decisions, whose figures are of the day of the decision.
fn figure_pages() -> Vec<Page> {
    let is_page =
        |page: &Page| page.path.to_str() == Some("README.md") || page.path.parent() == Some(BOOK.as_ref());
    pages::all().into_iter().filter(is_page).collect()
}

/// A number with its decimals, and its unit. A ratio has none.
type Figure = (f64, usize, String);

/// Returns the figures in the sentences of a page that no table has.
fn faults(page: &Page, pages: &[Page]) -> Vec<String> {
    let is_excepted = |figure: &str| {
        EXCEPTIONS.iter().any(|(name, figures, _)| {
            page.name().starts_with(name) && figures.split(' ').any(|of| of == figure)
        })
    };
    let is_measured = page.text.contains("<!-- end -->");
    let (own, prose) = split(page);
    let mut faults = Vec::new();
    for paragraph in prose.split("\n\n") {
        let mut tables = own.clone();
        for (_, target) in pages::targets(paragraph) {
            let file = target.split('#').next().unwrap().rsplit('/').next().unwrap();
            tables.extend(pages.iter().filter(|page| page.name() == file).map(|page| split(page).0));
        }
        for name in paragraph.split("benches/figures ").skip(1).filter_map(|rest| rest.split('`').next()) {
            tables.extend(fs::read_to_string(root().join(BOOK).join(format!("figures/{name}.md"))));
        }
        let known = in_table(&tables);
        for (text, figure) in in_sentences(&pages::inline_code(paragraph).1) {
            // Times without tables are mostly limits.
            let counts = is_measured || ["", "%"].contains(&&*figure.2);
            if counts && !is_excepted(&text) && !known.iter().any(|known| fits(&figure, known)) {
                faults.push(format!("{}: {text} {}", page.path.display(), figure.2));
            }
        }
    }
    faults
}

/// Returns the tables of a page, with all that `copy-tables` writes, and its sentences.
fn split(page: &Page) -> (String, String) {
    let copied = Regex::new(r"(?s)<!-- (table|figures): .*?<!-- end -->").unwrap();
    let mut tables: String = copied.find_iter(&page.text).map(|table| table.as_str()).collect();
    let rest = Page { path: page.path.clone(), text: copied.replace_all(&page.text, "").into() };
    let mut sentences = String::new();
    for line in rest.prose().lines() {
        let part = if line.trim_start().starts_with('|') { &mut tables } else { &mut sentences };
        *part += &format!("{line}\n");
    }
    (tables, sentences)
}

/// Returns the numbers of a table.
fn in_table(table: &str) -> Vec<Figure> {
    let number = Regex::new(r"(\d[\d.]*)(?: (%|µs|ms))?").unwrap();
    number.captures_iter(table).filter_map(|found| figure(&found[1], found.get(2))).collect()
}

/// Returns the figures in sentences, which have units: all of "1.3, 1.5 and 2.0 times", but not the product "512 × 8 KiB".
fn in_sentences(text: &str) -> Vec<(String, Figure)> {
    let list = r"\b((?:\d[\d.]*,?\s(?:(?:to|and|or)\s)?)*\d[\d.]*)\s?(?:×(\s\d)?|times\b|(%|µs|ms\b))";
    let (list, number) = (Regex::new(list).unwrap(), Regex::new(r"\d[\d.]*").unwrap());
    let lists = list.captures_iter(text).filter(|found| found.get(2).is_none());
    let figures = lists.flat_map(|found| {
        let numbers: Vec<&str> = number.find_iter(&found[1]).map(|number| number.as_str()).collect();
        let unit = found.get(3);
        // Ratios without a fraction are not measured: "four times", "2 times".
        let counts = numbers.into_iter().filter(move |number| unit.is_some() || number.contains('.'));
        counts.filter_map(|text| Some((text.to_owned(), figure(text, unit)?))).collect::<Vec<_>>()
    });
    figures.collect()
}

fn figure(number: &str, unit: Option<Match<'_>>) -> Option<Figure> {
    let decimals = number.split_once('.').map_or(0, |(_, fraction)| fraction.len());
    Some((number.parse().ok()?, decimals, unit.map_or(String::new(), |unit| unit.as_str().to_owned())))
}

/// Returns whether a figure is a known one, rounded, or the difference of a known ratio to one in percent.
fn fits((value, decimals, unit): &Figure, &(known, exact, ref of): &Figure) -> bool {
    let half = 0.5 * 0.1f64.powi(i32::try_from(*decimals).unwrap()) + 1e-9;
    let near = |of: f64| (value - of).abs() <= half;
    let in_percent = [known, known - 1.0, 1.0 - known, 1.0 - 1.0 / known, 1.0 / known - 1.0];
    unit == of && exact >= *decimals && near(known)
        || unit == "%" && of.is_empty() && in_percent.iter().any(|ratio| near(ratio * 100.0))
}
