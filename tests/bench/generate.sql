-- Makes of the rows in `incoming` what hindsight-api would have made of the same memories, in its own proportions:
-- a chunk for each memory that was stored, a document for twenty of them, ten links by time and two by meaning for
-- each, two entities for each. Foreign keys hold by construction, and a restore checks them.
INSERT INTO public.documents (id, bank_id, original_text, content_hash)
SELECT document, bank, string_agg(text, E'\n' ORDER BY number), md5(string_agg(text, E'\n' ORDER BY number))
FROM incoming WHERE kind <> 'observation' GROUP BY document, bank;

INSERT INTO public.chunks (chunk_id, document_id, bank_id, chunk_index, chunk_text, content_hash)
SELECT bank || '_' || document || '_' || number, document, bank, number % 20, text, encode(sha256(text::bytea), 'hex')
FROM incoming WHERE kind <> 'observation';

INSERT INTO public.memory_units
    (id, bank_id, document_id, chunk_id, text, embedding, event_date, mentioned_at, occurred_start, fact_type, proof_count,
     source_memory_ids, search_vector)
SELECT i.id, i.bank, d.document, i.bank || '_' || d.document || '_' || i.number, i.text, i.embedding, w.said, w.said,
    CASE WHEN i.number % 3 = 0 THEN w.said - interval '2 days' END, i.kind,
    CASE WHEN i.kind = 'observation' THEN 2 ELSE 1 END,
    CASE WHEN i.kind = 'observation'
        THEN ARRAY(SELECT s.id FROM incoming s WHERE s.bank = i.bank AND s.number IN (i.number + 1, i.number + 2))
        ELSE '{}' END,
    to_tsvector('english', i.text)
FROM incoming i
CROSS JOIN LATERAL (SELECT timestamptz '2024-01-01 08:00+00' + i.number * interval '97 minutes' AS said) w
CROSS JOIN LATERAL (SELECT CASE WHEN i.kind <> 'observation' THEN i.document END AS document) d;

INSERT INTO public.memory_links (from_unit_id, to_unit_id, link_type, weight, bank_id)
SELECT i.id, o.id, 'temporal', 1 - 0.05 * abs(o.number - i.number), i.bank
FROM incoming i CROSS JOIN LATERAL generate_series(1, 5) near (step) CROSS JOIN LATERAL (VALUES (1), (-1)) way (sign)
JOIN incoming o ON o.bank = i.bank AND o.number = i.number + near.step * way.sign;

INSERT INTO public.memory_links (from_unit_id, to_unit_id, link_type, weight, bank_id)
SELECT i.id, o.id, 'semantic', 0.7 + 0.001 * (i.number % 300), i.bank
FROM incoming i CROSS JOIN LATERAL (VALUES (40), (80)) far (step)  -- forty clusters: the same one
JOIN incoming o ON o.bank = i.bank AND o.number = i.number + far.step;

INSERT INTO public.entities (canonical_name, bank_id, mention_count)
SELECT DISTINCT 'Entity ' || number / 20, bank, 40 FROM incoming ON CONFLICT DO NOTHING;

INSERT INTO public.unit_entities (unit_id, entity_id)
SELECT DISTINCT i.id, e.id
FROM incoming i CROSS JOIN LATERAL (VALUES (i.number / 20), ((i.number + 400) / 20)) mentioned (entity)
JOIN public.entities e ON e.bank_id = i.bank AND lower(e.canonical_name) = 'entity ' || mentioned.entity;

INSERT INTO public.entity_cooccurrences (entity_id_1, entity_id_2, cooccurrence_count)
SELECT a.entity_id, b.entity_id, count(*)
FROM incoming i JOIN public.unit_entities a ON a.unit_id = i.id JOIN public.unit_entities b ON b.unit_id = i.id
WHERE a.entity_id < b.entity_id GROUP BY 1, 2;
